"""Remaining problem at prices of memory, and its best solutions, by counts of equal parts."""
