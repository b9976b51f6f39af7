/* CRC-32C (Castagnoli), reflected, as iSCSI and ext4 use it: crc32c(0, "123456789", 9) = 0xE3069283.
 *
 * With the CPU's instruction where there is one (x86-64 with SSE4.2, asked at run time; ARM64 when compiled for it),
 * otherwise from tables, eight bytes a step. A call continues where another stopped: crc32c(crc32c(0, a), b) is the
 * checksum of a followed by b.
 */
#ifndef SARP_CRC32C_H
#define SARP_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#elif defined(__x86_64__)
#include <nmmintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "crc32c.h reads words as they lie in memory: it needs a little-endian host"
#endif

static const uint32_t CRC32C_POLYNOMIAL = 0x82F63B78U; /* bits reflected */

/* crc32c_tables[n][b]: what byte b does to the checksum when n more bytes follow it. */
static uint32_t crc32c_tables[8][256];

/* Runs once, when the module that includes this header is loaded: no call ever meets half a table. */
__attribute__((constructor)) static void crc32c_build_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (CRC32C_POLYNOMIAL & (0U - (crc & 1)));
        crc32c_tables[0][byte] = crc;
    }
    for (int n = 1; n < 8; n++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = crc32c_tables[n - 1][byte];
            crc32c_tables[n][byte] = (crc >> 8) ^ crc32c_tables[0][crc & 0xFF];
        }
}

static inline uint32_t crc32c_software(uint32_t crc, const void *bytes, size_t length)
{
    const uint8_t *at = (const uint8_t *)bytes;
    crc = ~crc;
    for (; length >= 8; length -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        word ^= crc;
        crc = crc32c_tables[7][word & 0xFF] ^ crc32c_tables[6][(word >> 8) & 0xFF] ^
              crc32c_tables[5][(word >> 16) & 0xFF] ^ crc32c_tables[4][(word >> 24) & 0xFF] ^
              crc32c_tables[3][(word >> 32) & 0xFF] ^ crc32c_tables[2][(word >> 40) & 0xFF] ^
              crc32c_tables[1][(word >> 48) & 0xFF] ^ crc32c_tables[0][word >> 56];
    }
    for (; length > 0; length--, at++)
        crc = (crc >> 8) ^ crc32c_tables[0][(crc ^ *at) & 0xFF];
    return ~crc;
}

#if defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)

static inline uint32_t crc32c(uint32_t crc, const void *bytes, size_t length)
{
    const uint8_t *at = (const uint8_t *)bytes;
    crc = ~crc;
    for (; length >= 8; length -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        crc = __crc32cd(crc, word);
    }
    for (; length > 0; length--, at++)
        crc = __crc32cb(crc, *at);
    return ~crc;
}

#elif defined(__x86_64__)

__attribute__((target("sse4.2"))) static inline uint32_t crc32c_sse42(uint32_t crc, const void *bytes, size_t length)
{
    const uint8_t *at = (const uint8_t *)bytes;
    uint64_t wide = (uint32_t)~crc;
    for (; length >= 8; length -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = (uint32_t)wide;
    for (; length > 0; length--, at++)
        crc = _mm_crc32_u8(crc, *at);
    return ~crc;
}

static inline uint32_t crc32c(uint32_t crc, const void *bytes, size_t length)
{
    if (__builtin_cpu_supports("sse4.2"))
        return crc32c_sse42(crc, bytes, length);
    return crc32c_software(crc, bytes, length);
}

#else

static inline uint32_t crc32c(uint32_t crc, const void *bytes, size_t length)
{
    return crc32c_software(crc, bytes, length);
}

#endif

#endif
