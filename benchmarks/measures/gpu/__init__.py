"""Checks of what must hold on a GPU before anything that is planned for one is to be believed."""
