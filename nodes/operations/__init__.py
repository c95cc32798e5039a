"""What can be done to nodes once it is approved. ``settings.OPERATIONS`` names the objects of these modules."""
