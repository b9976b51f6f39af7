"""What the processes of a cluster agree on: who owns which slots, who is there, what has no key.

Pure, like the core: nothing here waits for a disk, a clock or a network. Where records have to last, a `RecordStore`
comes in as an argument.
"""
