// The digests of lynx_backend/wire.py: XXH3-64 of the XXH3-64 digests of a payload's 1 MiB blocks.
//
// XXH3 adds up products of 64-byte stripes and scrambles the sums after every KiB. The sums of
// different KiB do not depend on each other, so eight warps compute them while a ninth follows the
// chain of scrambles, one segment behind.
#define DIGEST_BLOCK (1 << 20)
#define SEGMENT 128  // KiB
#define WARPS 8      // that sum
#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

__constant__ u64 secret[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};

// What the kernels of one encoding or verification tell each other; zero before and after.
struct Scratch {
    u32 bad, exact, done, done_digest;
    u32 index[64];  // exact tokens, ascending
    u32 counts[1];  // for each token, small key channels
};

// 8 bytes from any address.
DEVICE u64 read64(const u8* at) {
    u64 x = 0;
    for (int i = 7; i >= 0; --i) x = x << 8 | at[i];
    return x;
}
DEVICE u64 secret64(int at) { return read64(reinterpret_cast<const u8*>(secret) + at); }
DEVICE u64 product(u64 x) { return (u64)(u32)x * (x >> 32); }
DEVICE u64 fold(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }
DEVICE u64 avalanche(u64 h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9ull;
    return h ^ h >> 32;
}
DEVICE u64 avalanche_short(u64 h) {
    h = (h ^ h >> 33) * PRIME64_2;
    h = (h ^ h >> 29) * PRIME64_3;
    return h ^ h >> 32;
}
DEVICE u64 rotate_left(u64 x, int n) { return x << n | x >> (64 - n); }
DEVICE u64 mix16(const u8* in, int at) {
    return fold(read64(in) ^ secret64(at), read64(in + 8) ^ secret64(at + 8));
}
DEVICE u64 swap_bytes(u64 x) {
    return (u64)__byte_perm((u32)x, 0, 0x0123) << 32 | __byte_perm((u32)(x >> 32), 0, 0x0123);
}

// At most 240 bytes, by one thread.
static __device__ u64 digest_short(const u8* in, i64 n) {
    if (n == 0) return avalanche_short(secret64(56) ^ secret64(64));
    if (n <= 3) {
        u32 x = (u32)in[0] << 16 | (u32)in[n >> 1] << 24 | in[n - 1] | (u32)n << 8;
        return avalanche_short(x ^ (u64)((u32)secret64(0) ^ (u32)secret64(4)));
    }
    if (n <= 8) {
        u64 low = (u32)in[0] | (u32)in[1] << 8 | (u32)in[2] << 16 | (u32)in[3] << 24;
        const u8* end = in + n - 4;
        u64 high = (u32)end[0] | (u32)end[1] << 8 | (u32)end[2] << 16 | (u32)end[3] << 24;
        u64 h = (high + (low << 32)) ^ secret64(8) ^ secret64(16);
        h ^= rotate_left(h, 49) ^ rotate_left(h, 24);
        h *= 0x9FB21C651E98DF25ull;
        h = (h ^ ((h >> 35) + n)) * 0x9FB21C651E98DF25ull;
        return h ^ h >> 28;
    }
    if (n <= 16) {
        u64 low = read64(in) ^ secret64(24) ^ secret64(32);
        u64 high = read64(in + n - 8) ^ secret64(40) ^ secret64(48);
        return avalanche(n + swap_bytes(low) + high + fold(low, high));
    }
    u64 sum = n * PRIME64_1;
    if (n <= 128) {
        for (int i = (int)(n - 1) / 32; i >= 0; --i)
            sum += mix16(in + 16 * i, 32 * i) + mix16(in + n - 16 * (i + 1), 32 * i + 16);
        return avalanche(sum);
    }
    for (int i = 0; i < 8; ++i) sum += mix16(in + 16 * i, 16 * i);
    sum = avalanche(sum);
    for (int i = 8; i < n / 16; ++i) sum += mix16(in + 16 * i, 16 * (i - 8) + 3);
    return avalanche(sum + mix16(in + n - 16, 119));
}

DEVICE u64 initial(int lane) {
    switch (lane) {
        case 0: return PRIME32_3;
        case 1: return PRIME64_1;
        case 2: return PRIME64_2;
        case 3: return PRIME64_3;
        case 4: return PRIME64_4;
        case 5: return PRIME32_2;
        case 6: return PRIME64_5;
        default: return PRIME32_1;
    }
}

// More than 240 bytes, from an address that is a multiple of 8, by a block of WARPS + 1 warps.
// The result is thread 0's.
static __device__ u64 digest_long(const u8* in, i64 n) {
    __shared__ u64 sums[2][SEGMENT][8], state[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int whole = (int)((n - 1) / 1024), segments = (whole + SEGMENT - 1) / SEGMENT;
    // Of each KiB a thread has lanes 2·pair and 2·pair + 1 of stripes `stripe` and `stripe + 8`.
    const int pair = lane % 4, stripe = lane / 4;
    const u64 k0 = secret[stripe + 2 * pair], k1 = secret[stripe + 2 * pair + 1];
    const u64 k2 = secret[8 + stripe + 2 * pair], k3 = secret[9 + stripe + 2 * pair];
    const bool wide = reinterpret_cast<u64>(in) % 16 == 0;
    u64 acc = initial(lane % 8);
    const u64 scramble = secret[16 + lane % 8];
    for (int s = 0; s <= segments; ++s) {
        if (warp < WARPS) {
            const int first = s * SEGMENT, end = min(whole, first + SEGMENT);
#pragma unroll 4
            for (int kib = first + warp; kib < end; kib += WARPS) {
                const u8* at = in + (i64)kib * 1024 + lane * 16;
                u64 x0, x1, x2, x3;
                if (wide) {
                    ulonglong2 low = *reinterpret_cast<const ulonglong2*>(at);
                    ulonglong2 high = *reinterpret_cast<const ulonglong2*>(at + 512);
                    x0 = low.x, x1 = low.y, x2 = high.x, x3 = high.y;
                } else {
                    const u64* words = reinterpret_cast<const u64*>(at);
                    x0 = words[0], x1 = words[1], x2 = words[64], x3 = words[65];
                }
                u64 even = x1 + product(x0 ^ k0) + x3 + product(x2 ^ k2);
                u64 odd = x0 + product(x1 ^ k1) + x2 + product(x3 ^ k3);
#pragma unroll
                for (int step = 4; step < 32; step *= 2) {
                    even += __shfl_xor_sync(0xFFFFFFFFu, even, step);
                    odd += __shfl_xor_sync(0xFFFFFFFFu, odd, step);
                }
                if (lane < 4) {
                    sums[s & 1][kib - first][2 * lane] = even;
                    sums[s & 1][kib - first][2 * lane + 1] = odd;
                }
            }
        } else if (s > 0 && lane < 8) {
            const int first = (s - 1) * SEGMENT, end = min(whole, first + SEGMENT);
#pragma unroll 8
            for (int kib = first; kib < end; ++kib) {
                acc += sums[(s - 1) & 1][kib - first][lane];
                acc = (acc ^ acc >> 47 ^ scramble) * PRIME32_1;
            }
        }
        __syncthreads();
    }
    if (warp == WARPS && lane < 8) {
        const u64* words = reinterpret_cast<const u64*>(in + (i64)whole * 1024);
        const int stripes = (int)((n - 1 - (i64)whole * 1024) / 64);
        for (int i = 0; i < stripes; ++i)
            acc += words[8 * i + (lane ^ 1)] + product(words[8 * i + lane] ^ secret[i + lane]);
        const u8* tail = in + n - 64;
        acc += read64(tail + 8 * (lane ^ 1)) + product(read64(tail + 8 * lane) ^ secret64(121 + 8 * lane));
        state[lane] = acc;
    }
    __syncthreads();
    u64 h = n * PRIME64_1;
    if (threadIdx.x == 0)
        for (int i = 0; i < 4; ++i)
            h += fold(state[2 * i] ^ secret64(11 + 16 * i), state[2 * i + 1] ^ secret64(19 + 16 * i));
    __syncthreads();
    return avalanche(h);
}

static __device__ u64 digest(const u8* in, i64 n) {
    return n <= 240 ? digest_short(in, n) : digest_long(in, n);
}

DEVICE i64 blocks_of(i64 bytes) { return (bytes + DIGEST_BLOCK - 1) / DIGEST_BLOCK; }

// Digests of an anchor's and a residual's payload of sizes the device knows: the whole grid works on
// their blocks, and the block that ends last on the digests of these. True, with `out` filled for
// thread 0, in that one.
DEVICE bool digest_both(const u8* anchor, i64 anchor_bytes, const u8* residual, i64 residual_bytes,
                        i64 block, u64* digests, Scratch* s, u64 (&out)[2]) {
    __shared__ bool is_last;
    const i64 anchors = blocks_of(anchor_bytes), all = anchors + blocks_of(residual_bytes);
    if (block < all) {
        const bool first = block < anchors;
        const i64 start = (first ? block : block - anchors) * DIGEST_BLOCK;
        const i64 bytes = first ? anchor_bytes : residual_bytes;
        u64 h = digest((first ? anchor : residual) + start,
                       bytes - start < DIGEST_BLOCK ? bytes - start : DIGEST_BLOCK);
        if (threadIdx.x == 0) digests[block] = swap_bytes(h);  // as bytes, most significant first
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&s->done_digest, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return false;
    __threadfence();
    out[0] = digest(reinterpret_cast<const u8*>(digests), 8 * anchors);
    out[1] = digest(reinterpret_cast<const u8*>(digests + anchors), 8 * (all - anchors));
    if (threadIdx.x == 0) s->done_digest = 0;
    return true;
}

// What an encoding tells the host. `record` (in its memory): 1 when the cache cannot be encoded,
// number of exact tokens, digest of the anchor, of the residual.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1)) seal(
    const u8* anchor, i64 anchor_bytes, i64 exact_row, const u8* residual, i64 residual_bytes,
    u64* digests, Scratch* s, u64* record)
{
    u64 found[2];
    const u32 exact = s->exact;
    if (!digest_both(anchor, anchor_bytes + exact * exact_row, residual, residual_bytes, blockIdx.x,
                     digests, s, found) || threadIdx.x) return;
    record[0] = s->bad;
    record[1] = exact;
    record[2] = found[0];
    record[3] = found[1];
    s->bad = s->exact = 0;
    __threadfence_system();
}

#define WRONG_ANCHOR 1
#define WRONG_RESIDUAL 2
#define WRONG_SCALES 4
#define WRONG_INDICES 8

// The last step of a verification: digests, and with what `bad` says, a sum of WRONG_*, for the
// decoder (`gate`) and the host (`record`).
DEVICE void verdict(const u8* anchor, i64 anchor_bytes, u64 anchor_digest, const u8* residual,
                    i64 residual_bytes, u64 residual_digest, u64* digests, Scratch* s, u32* gate,
                    u64* record) {
    u64 found[2];
    if (!digest_both(anchor, anchor_bytes, residual, residual_bytes, blockIdx.x, digests, s, found) ||
        threadIdx.x) return;
    u32 wrong = s->bad;
    if (found[0] != anchor_digest) wrong |= WRONG_ANCHOR;
    if (residual_bytes && found[1] != residual_digest) wrong |= WRONG_RESIDUAL;
    s->bad = 0;
    *gate = wrong;
    *record = wrong;
    __threadfence_system();
}
