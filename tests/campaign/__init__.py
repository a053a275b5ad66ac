"""The fault campaign: real processes and real stores under kills, damage, full disks and vanishing directories.

``python -m tests.campaign`` runs it whole and prints its figures.
"""
