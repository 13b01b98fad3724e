"""What prices leave of a problem, and the best solutions of that: by labels, and by counts of equal parts."""
