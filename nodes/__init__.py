"""The registry of GPU nodes: enrolment, sessions and links, health, owner reclaim."""
