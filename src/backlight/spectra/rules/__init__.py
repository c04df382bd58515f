"""Rules on stored spectra; each file registers one."""
