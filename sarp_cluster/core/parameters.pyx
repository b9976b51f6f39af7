# cython: language_level=3
"""The settings of SARP in the form the compiled core reads: no lookup, no Python object on the hot path."""

from libc.limits cimport INT_MAX


cdef class SarpParameters:
    """The settings of SARP as the compiled core reads them."""

    def __init__(self, config):
        self.c.segment_blocks = config.segment_blocks
        self.c.interval = config.segment_blocks // config.base_points
        self.c.refinement_threshold = config.refinement_threshold if config.refine else INT_MAX
        self.c.prune = config.prune
        self.c.pruning_threshold = config.pruning_threshold if config.prune else 0
        self.c.retrieval_max = INT_MAX if config.retrieval_max is None else config.retrieval_max
        self.c.stride = config.stride
        self.c.lead = config.filter_lead
        self.c.first_bits = config.filter_first_bits
        self.c.fields = 1 + (config.filter_bits - config.filter_first_bits) // 8
        self.c.reach = self.c.lead + self.c.fields * self.c.stride
        self.c.wide = config.filter_bits == 128
        self.c.filters = config.filter
        self.c.key_mask = (2**64 - 1) ^ (2 ** (64 - config.routing_key_bits) - 1)
        self.c.field_mask = 2**config.filter_field_bits - 1
        self.c.first_mask = 2 ** (config.filter_field_bits * config.filter_first_bits // 8) - 1
