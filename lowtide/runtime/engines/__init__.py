"""Engines: the few calls by which bytes leave the device and come back."""
