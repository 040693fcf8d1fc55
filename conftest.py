"""Settings that every test of every package shares."""

from hypothesis import settings

# Ranks and compilers make a first example slow: time is the timeout's business, not hypothesis'.
settings.register_profile("shardworks", deadline=None, max_examples=50)
settings.load_profile("shardworks")
