"""The fault campaign: real processes and real stores under kills, damage, full disks and vanishing directories.

``python -m tests.campaign`` runs all of it and prints its figures.
"""
