"""Problems with several memory rows: a price for each row, and the best of what prices leave."""
