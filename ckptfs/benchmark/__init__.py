"""What `ckptfs bench` runs: every measurement beside the thing it is compared with, in one run.

suite: which measurements there are, and what each must reach.   report: the table and the JSON.
workloads: what is timed.   places: where it is done to.   fio: what the devices can do.   machine: where we are.
"""
