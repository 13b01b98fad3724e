"""Random programs on simulated ranks, compared with one process. `python -m tests.fuzz --cases 1000` runs a campaign.

program → draw → trial → shrink → campaign: what a program is, how one is drawn from a seed, one case run and judged,
a failing case made smaller, and many cases in a row. `found.py` keeps what campaigns have found.
"""
