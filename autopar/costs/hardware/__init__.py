"""The machine: profiles (JSON in `profiles/`), and the seconds of a collective on its links.

Decides how fast devices and links are. Knows nothing of programs or operations.
"""
