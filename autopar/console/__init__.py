"""Text for people: units, tables, progress, and the names that options take."""
