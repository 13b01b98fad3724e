"""Remaining problem at prices of memory, and its best solutions: by labels, and by counts of equal parts."""
