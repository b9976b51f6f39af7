# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False, binding=False
"""CRC-32C for tests and tools. Compiled code cimports the C functions and calls them without Python."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t

from sarp_cluster.storage cimport crc32c as c


def crc32c(data, uint32_t value=0):
    """CRC-32C of `data`, continuing from `value`, the checksum of what came before it."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return c.crc32c(value, view.buf, <size_t>view.len)
    finally:
        PyBuffer_Release(&view)


def crc32c_software(data, uint32_t value=0):
    """The same from tables, whatever the CPU offers: the path of a host without the instruction."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return c.crc32c_software(value, view.buf, <size_t>view.len)
    finally:
        PyBuffer_Release(&view)
