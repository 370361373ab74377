"""The soak: real servers on tiny pools under a seeded random mixture of requests, departures and faults.

`make soak SECONDS=N SEED=S` runs it. `campaign.py` has the course of a run, `audit.py` what has to hold at its quiet
points, `truth.py` what every text has to be.
"""
