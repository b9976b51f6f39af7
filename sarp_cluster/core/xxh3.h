/* XXH3, 64 bits, with a seed: the hash that block IDs are made of.
 *
 * Written from the published description of the algorithm. The output must never change: it names blocks on disk and in
 * other programs' events. tests/unit/test_block_id.py compares it with the reference package at every length class.
 *
 * An input is hashed by its length:
 *     0          the seed alone
 *     1..3       three of its bytes and the length, in one word
 *     4..8       two overlapping 4-byte words
 *     9..16      two overlapping 8-byte words      <- a link of the chain: previous ID, local hash
 *     17..128    16-byte pairs taken from both ends <- a block of 16 tokens is 64 bytes
 *     129..240   the same, one after the other
 *     above      stripes of 64 bytes into eight accumulators, scrambled after each 1,024 bytes
 */
#ifndef SARP_XXH3_H
#define SARP_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "xxh3.h reads words as they lie in memory: it needs a little-endian host"
#endif
#if !defined(__SIZEOF_INT128__)
#error "xxh3.h needs a compiler with a 128-bit integer (GCC or Clang, 64-bit target)"
#endif

#define XXH3_SECRET_BYTES 192
#define XXH3_STRIPE_BYTES 64
#define XXH3_STRIPES_A_BLOCK ((XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES) / 8)

static const uint32_t XXH3_PRIME32_1 = 0x9E3779B1U;
static const uint32_t XXH3_PRIME32_2 = 0x85EBCA77U;
static const uint32_t XXH3_PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t XXH3_PRIME64_1 = 0x9E3779B185EBCA87ULL;
static const uint64_t XXH3_PRIME64_2 = 0xC2B2AE3D27D4EB4FULL;
static const uint64_t XXH3_PRIME64_3 = 0x165667B19E3779F9ULL;
static const uint64_t XXH3_PRIME64_4 = 0x85EBCA77C2B2AE63ULL;
static const uint64_t XXH3_PRIME64_5 = 0x27D4EB2F165667C5ULL;
static const uint64_t XXH3_PRIME_MIX_1 = 0x165667919E3779F9ULL;
static const uint64_t XXH3_PRIME_MIX_2 = 0x9FB21C651E98DF25ULL;

/* The algorithm's fixed secret: random bytes without meaning. */
static const uint8_t XXH3_SECRET[XXH3_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint32_t xxh3_read32(const void *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static inline uint64_t xxh3_read64(const void *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static inline uint64_t xxh3_rotate_left(uint64_t word, int bits)
{
    return (word << bits) | (word >> (64 - bits));
}

/* The two halves of the 128-bit product, folded by xor. */
static inline uint64_t xxh3_multiply_fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t xxh3_avalanche(uint64_t hash)
{
    hash ^= hash >> 37;
    hash *= XXH3_PRIME_MIX_1;
    return hash ^ (hash >> 32);
}

/* The stronger finish, for inputs too short to be mixed on the way. */
static inline uint64_t xxh3_avalanche_short(uint64_t hash)
{
    hash ^= hash >> 33;
    hash *= XXH3_PRIME64_2;
    hash ^= hash >> 29;
    hash *= XXH3_PRIME64_3;
    return hash ^ (hash >> 32);
}

static inline uint64_t xxh3_mix16(const uint8_t *data, const uint8_t *secret, uint64_t seed)
{
    return xxh3_multiply_fold(xxh3_read64(data) ^ (xxh3_read64(secret) + seed),
                              xxh3_read64(data + 8) ^ (xxh3_read64(secret + 8) - seed));
}

static inline uint64_t xxh3_1_to_3(const uint8_t *data, size_t length, uint64_t seed)
{
    uint32_t packed = ((uint32_t)data[0] << 16) | ((uint32_t)data[length >> 1] << 24) | data[length - 1] |
                      ((uint32_t)length << 8);
    uint64_t flip = (uint64_t)(xxh3_read32(XXH3_SECRET) ^ xxh3_read32(XXH3_SECRET + 4)) + seed;
    return xxh3_avalanche_short(packed ^ flip);
}

static inline uint64_t xxh3_4_to_8(const uint8_t *data, size_t length, uint64_t seed)
{
    uint64_t flip, hash;
    seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
    flip = (xxh3_read64(XXH3_SECRET + 8) ^ xxh3_read64(XXH3_SECRET + 16)) - seed;
    hash = (xxh3_read32(data + length - 4) + ((uint64_t)xxh3_read32(data) << 32)) ^ flip;
    hash ^= xxh3_rotate_left(hash, 49) ^ xxh3_rotate_left(hash, 24);
    hash *= XXH3_PRIME_MIX_2;
    hash ^= (hash >> 35) + length;
    hash *= XXH3_PRIME_MIX_2;
    return hash ^ (hash >> 28);
}

/* The 9..16 class from its two words, which may already be in registers. */
static inline uint64_t xxh3_two_words(uint64_t first, uint64_t last, size_t length, uint64_t seed)
{
    uint64_t low = first ^ ((xxh3_read64(XXH3_SECRET + 24) ^ xxh3_read64(XXH3_SECRET + 32)) + seed);
    uint64_t high = last ^ ((xxh3_read64(XXH3_SECRET + 40) ^ xxh3_read64(XXH3_SECRET + 48)) - seed);
    return xxh3_avalanche(length + __builtin_bswap64(low) + high + xxh3_multiply_fold(low, high));
}

static inline uint64_t xxh3_17_to_128(const uint8_t *data, size_t length, uint64_t seed)
{
    uint64_t sum = length * XXH3_PRIME64_1;
    size_t pairs = (length - 1) / 32; /* further pairs of 16 bytes, one from each end */
    for (size_t i = 0; i <= pairs; i++) {
        sum += xxh3_mix16(data + 16 * i, XXH3_SECRET + 32 * i, seed);
        sum += xxh3_mix16(data + length - 16 * (i + 1), XXH3_SECRET + 32 * i + 16, seed);
    }
    return xxh3_avalanche(sum);
}

static inline uint64_t xxh3_129_to_240(const uint8_t *data, size_t length, uint64_t seed)
{
    uint64_t sum = length * XXH3_PRIME64_1;
    size_t rounds = length / 16;
    for (size_t i = 0; i < 8; i++)
        sum += xxh3_mix16(data + 16 * i, XXH3_SECRET + 16 * i, seed);
    sum = xxh3_avalanche(sum);
    for (size_t i = 8; i < rounds; i++) /* 3 and 17: the algorithm's own offsets into its secret */
        sum += xxh3_mix16(data + 16 * i, XXH3_SECRET + 16 * (i - 8) + 3, seed);
    sum += xxh3_mix16(data + length - 16, XXH3_SECRET + 136 - 17, seed);
    return xxh3_avalanche(sum);
}

static inline void xxh3_accumulate(uint64_t lanes[8], const uint8_t *stripe, const uint8_t *secret)
{
    for (int i = 0; i < 8; i++) {
        uint64_t word = xxh3_read64(stripe + 8 * i);
        uint64_t keyed = word ^ xxh3_read64(secret + 8 * i);
        lanes[i ^ 1] += word;
        lanes[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
}

static inline void xxh3_scramble(uint64_t lanes[8], const uint8_t *secret)
{
    for (int i = 0; i < 8; i++)
        lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ xxh3_read64(secret + 8 * i)) * XXH3_PRIME32_1;
}

/* The secret that long inputs use: the fixed one with the seed added and subtracted in turn. */
static inline void xxh3_seed_secret(uint8_t secret[XXH3_SECRET_BYTES], uint64_t seed)
{
    for (int i = 0; i < XXH3_SECRET_BYTES; i += 16) {
        uint64_t low = xxh3_read64(XXH3_SECRET + i) + seed;
        uint64_t high = xxh3_read64(XXH3_SECRET + i + 8) - seed;
        memcpy(secret + i, &low, sizeof low);
        memcpy(secret + i + 8, &high, sizeof high);
    }
}

static inline uint64_t xxh3_above_240(const uint8_t *data, size_t length, uint64_t seed)
{
    const size_t block = XXH3_STRIPE_BYTES * XXH3_STRIPES_A_BLOCK;
    uint8_t secret[XXH3_SECRET_BYTES];
    const uint8_t *last_secret = secret + XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES;
    uint64_t lanes[8] = {XXH3_PRIME32_3, XXH3_PRIME64_1, XXH3_PRIME64_2, XXH3_PRIME64_3,
                         XXH3_PRIME64_4, XXH3_PRIME32_2, XXH3_PRIME64_5, XXH3_PRIME32_1};
    size_t left = length - 1; /* the last byte belongs to the last stripe, which overlaps the one before */
    const uint8_t *at = data;
    uint64_t hash = length * XXH3_PRIME64_1;

    xxh3_seed_secret(secret, seed);
    for (; left >= block; left -= block, at += block) {
        for (size_t i = 0; i < XXH3_STRIPES_A_BLOCK; i++)
            xxh3_accumulate(lanes, at + XXH3_STRIPE_BYTES * i, secret + 8 * i);
        xxh3_scramble(lanes, last_secret);
    }
    for (size_t i = 0; i < left / XXH3_STRIPE_BYTES; i++)
        xxh3_accumulate(lanes, at + XXH3_STRIPE_BYTES * i, secret + 8 * i);
    xxh3_accumulate(lanes, data + length - XXH3_STRIPE_BYTES, last_secret - 7);

    for (int i = 0; i < 4; i++)
        hash += xxh3_multiply_fold(lanes[2 * i] ^ xxh3_read64(secret + 11 + 16 * i),
                                   lanes[2 * i + 1] ^ xxh3_read64(secret + 11 + 16 * i + 8));
    return xxh3_avalanche(hash);
}

static inline uint64_t xxh3_64(const void *bytes, size_t length, uint64_t seed)
{
    const uint8_t *data = (const uint8_t *)bytes;
    if (length > 240)
        return xxh3_above_240(data, length, seed);
    if (length > 128)
        return xxh3_129_to_240(data, length, seed);
    if (length > 16)
        return xxh3_17_to_128(data, length, seed);
    if (length > 8)
        return xxh3_two_words(xxh3_read64(data), xxh3_read64(data + length - 8), length, seed);
    if (length >= 4)
        return xxh3_4_to_8(data, length, seed);
    if (length > 0)
        return xxh3_1_to_3(data, length, seed);
    return xxh3_avalanche_short(seed ^ xxh3_read64(XXH3_SECRET + 56) ^ xxh3_read64(XXH3_SECRET + 64));
}

#endif
