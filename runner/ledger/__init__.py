"""What a runner must not forget: one SQLite file with operations, fences, policies, observations and costs."""
