"""The tests. What Hypothesis is to do is said here, before any test is defined."""

from hypothesis import HealthCheck, settings

# Examples run beside other processes on few cores: no example is too slow by itself.
# And a suite's tests are meant to be inherited by several classes.
settings.register_profile("shardfs", deadline=None, suppress_health_check=[HealthCheck.differing_executors])
settings.load_profile("shardfs")
