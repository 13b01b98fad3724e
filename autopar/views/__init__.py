"""Views of a plan: reports, questions, formulas, and translations for other systems."""
