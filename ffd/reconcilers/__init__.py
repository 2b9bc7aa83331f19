"""What keeps I6 while nobody is looking: one file per reconciler, each a tick over one partition.

A tick moves up to a batch of due rows in one autocommit statement that skips what others hold, so that a node that is
paused or cut off in the middle holds no lock, and two nodes that sweep one partition waste work and break nothing. A
tick that ends members of flows takes no flow lock: what their flows are owed is recorded in its own statement.
"""
