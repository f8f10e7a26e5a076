"""What POSIX has file systems do, as small cases that run in any directory.

The cases follow what pjdfstest looks at, in words of our own, without what needs a second user, and without what
`tests.write.semantics` shows of all kinds of files. All of them pass on a plain local directory of Linux.
Run them as a program: `python -m tests.write.posix DIRECTORY [PREFIX ...]` prints what failed as JSON.
"""
