from sarp_cluster.core.posting_run import PostingRun

class RunMerge:
    run: PostingRun
    first_level: int
    levels: int
    def step(self, limit: int) -> bool: ...
