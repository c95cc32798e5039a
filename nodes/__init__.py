"""The registry of GPU boxes: enrolment, sessions and links, health, owner reclaim."""
