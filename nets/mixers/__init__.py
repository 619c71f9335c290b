"""Mixers: one file per way of moving information along time, each with the trajectory encoder built on it."""
