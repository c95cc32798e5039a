"""The path of an inference request, a module for each noun: who asks, what may answer, where, one try, what is said, kept."""
