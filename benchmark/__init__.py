"""Harnesses that measure the project; each is a module to run. Nothing in `mstar` imports them."""
