"""The thresholds of the health room, each with its reason; written by the health floor's author."""
