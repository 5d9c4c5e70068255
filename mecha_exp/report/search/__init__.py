"""What a search shows beside the table of every sweep.

front.py        the Pareto front of several objectives, its members and its hypervolume
hypervolume.py  the volume that settings dominate, trial by trial
gain.py         what a search gained over its trials at random, and whether that is more than chance
importance.py   how much each key decides, with the estimator that says so
notes.py        their sentences below a table
"""
