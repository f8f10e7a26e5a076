"""What POSIX has file systems do, as small cases that run in any directory.

The cases follow what pjdfstest looks at, in words of our own, without what needs a second user. On a plain local
directory of Linux all of them pass; where they may fail on a mount stands with the tests that run them, by name.
Run them as a program: `python -m tests.write.posix DIRECTORY [PREFIX ...]` prints what failed as JSON. With `--chunks`
the directory is one of chunks, and the cases are those of `chunks`.
"""
