// The encoder of the profile `adaptive`. Also compiled with STAGED 0 | 1 and COPY elements.
//
// STAGED: the head's page is copied into shared memory, COPY elements at a time, so that the device's
// memory is read once; the codes then take its place. Otherwise it is too large, and read again.
//
// A width's plane holds the channels of all heads, so a block must know the other heads' widths
// before it can write. Blocks take their work in order from a counter and wait only for blocks that
// began at most HEADS places from them; HEADS is at most what the device runs at once.
#define STEP (1 << RESIDUAL_BITS)
#define UNIT 0x4B000000u  // 2^23, whose last bit is worth 1

struct Shared {
#if STAGED
    uint4 tile[(PAGE * DIM * ELEMENT_BYTES + 15) / 16];  // [PAGE][DIM]; then words
#else
    u64 tile[PAGE / 8 * DIM];  // words
#endif
    int bottom[DIM], top[DIM];  // of a channel, in_order
    float low[DIM], factor[DIM];
    __align__(16) float by[PAGE];  // what a token's values are multiplied with
    float squares[PAGE];
#if BLOCK
    i64 at[PAGE];  // where a token lies, in elements; negative: nowhere
#endif
    float rows[PAIRED || !PAIRS ? 1 : ROWS][PAIRED || !PAIRS ? 1 : DIM];
    Channels c;
    int star, exponent, ticket;
    u32 peak;
    u16 ranges[DIM], row_code[DIM];
    // The first or the last 32 bits of all channels' codes of 8 tokens.
    DEVICE_MEMBER u32* words(int group, int half) {
        return reinterpret_cast<u32*>(reinterpret_cast<u8*>(tile) + group * 8 * DIM * (STAGED ? ELEMENT_BYTES : 1)) + half * DIM;
    }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES");

// A float as an integer that sorts as it does, and back.
DEVICE int in_order(float x) {
    const int bits = __float_as_int(x);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
DEVICE float from_order(int x) { return __int_as_float(x ^ (x >> 31 & 0x7FFFFFFF)); }

// A head's page as the passes read it.
struct Source {
    const u8* from;  // the head's first channel in the unit
    i64 step;        // bytes between tokens of a tensor; `from` is its page's first one then
    const Shared* s;
    // Of a token beyond the page's, what is there does not matter.
    DEVICE_MEMBER const u8* token(int t, int length) const {
#if STAGED
        return reinterpret_cast<const u8*>(s->tile) + t * DIM * ELEMENT_BYTES;
#else
        return there(t < length ? t : 0);
#endif
    }
    DEVICE_MEMBER const u8* there(int t) const {
#if BLOCK
        const i64 at = s->at[t];
        return from + (at < 0 ? 0 : at) * ELEMENT_BYTES;
#else
        return from + t * step;
#endif
    }
};

// Copies a page to `tile`, with zeros up to a multiple of 8 tokens.
DEVICE void stage(const Source& source, u8* tile, int length) {
#if STAGED
    constexpr int BYTES = COPY * ELEMENT_BYTES, PARTS = DIM / COPY, ACROSS = PARTS < THREADS ? PARTS : THREADS;
    constexpr int AT_ONCE = THREADS / ACROSS;
    const int first = threadIdx.x / ACROSS < AT_ONCE ? threadIdx.x / ACROSS : PAGE;
#pragma unroll 1
    for (int part = threadIdx.x % ACROSS; part < PARTS; part += ACROSS) {
        const u8* from = source.from + part * BYTES + (BLOCK ? 0 : first * source.step);
        u8* to = tile + first * DIM * ELEMENT_BYTES + part * BYTES;
#pragma unroll 4
        for (int t = first; t < length; t += AT_ONCE) {
            const u8* at = BLOCK ? source.there(t) + part * BYTES : from;
#if COPY * ELEMENT_BYTES == 16
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(at));
#elif COPY * ELEMENT_BYTES >= 4
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(at), "n"(BYTES));
#else
            *reinterpret_cast<u16*>(to) = *reinterpret_cast<const u16*>(at);
#endif
            from += AT_ONCE * source.step;
            to += AT_ONCE * DIM * ELEMENT_BYTES;
        }
    }
    Bits<ELEMENT_BYTES>::T* rest = reinterpret_cast<Bits<ELEMENT_BYTES>::T*>(tile) + length * DIM;
    for (int i = threadIdx.x; i < (8 - length % 8) % 8 * DIM; i += THREADS) rest[i] = 0;
    asm volatile("cp.async.commit_group;\ncp.async.wait_all;" ::: "memory");
    __syncthreads();
#endif
}

// Brings a page, which is staged later, into the L2 cache.
DEVICE void ask_ahead(const Source& source, int length) {
    for (int t = threadIdx.x; t < length; t += THREADS)
        for (int at = 0; at < DIM * ELEMENT_BYTES; at += 128)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(source.there(t) + at));
}

// Sums of squares of all tokens, by halves: element i takes element i + half.
DEVICE void sum_squares(const Source& source, Shared& s, int row, int lane, int length) {
    constexpr int W = BESIDE;
    for (int group = row; group < (length + 7) / 8; group += ROWS) {
        float sum[8][W];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float part[MINE];
            const int t = group * 8 + i;
            load_token(part, source.token(t, length), lane, nullptr);
#pragma unroll
            for (int e = 0; e < MINE; ++e) part[e] = part[e] * part[e];
#pragma unroll
            for (int n = MINE / 2; n >= W; n /= 2)
#pragma unroll
                for (int e = 0; e < n; ++e) part[e] = part[e] + part[e + n];
#pragma unroll
            for (int e = 0; e < W; ++e) sum[i][e] = part[e];
        }
        // Across lanes; each step leaves half of the tokens to the partner.
        const u32 lanes = row_lanes();
        int first = 0;
#pragma unroll
        for (int level = 0; level < 5; ++level) {
            const int stride = LANES >> (level + 1), half = 4 >> level;
            if (stride == 0) break;
            const bool upper = lane & stride;
            if (half > 0) {
#pragma unroll
                for (int i = 0; i < half; ++i)
#pragma unroll
                    for (int e = 0; e < W; ++e) {
                        const float send = upper ? sum[i][e] : sum[i + half][e];
                        const float keep = upper ? sum[i + half][e] : sum[i][e];
                        sum[i][e] = keep + __shfl_xor_sync(lanes, send, stride);
                    }
                if (upper) first += half;
            } else {
#pragma unroll
                for (int e = 0; e < W; ++e) sum[0][e] += __shfl_xor_sync(lanes, sum[0][e], stride);
            }
        }
        constexpr int HELD = LANES >= 8 ? 1 : 8 / LANES;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
#pragma unroll
            for (int n = W / 2; n; n /= 2)
#pragma unroll
                for (int e = 0; e < n; ++e) sum[i][e] = sum[i][e] + sum[i][e + n];
            s.squares[group * 8 + first + i] = sum[i][0];
        }
    }
}

// A head's widths, from the levels of its channels, by one warp: the threshold of the last bit by
// bisection; of several bits at it the lowest channels have theirs.
DEVICE void set_widths(Shared& s, const u16* ranges, const signed char* priority, int total) {
    constexpr int EACH = (DIM + 31) / 32;
    const int lane = threadIdx.x % 32;
    int level[EACH], low = 1 << 30, high = -(1 << 30);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = i * 32 + lane;
        level[i] = c < DIM ? ranges[c] + 128 * (priority ? priority[c] : 0) : -(1 << 24);
        if (c < DIM) low = min(low, level[i]), high = max(high, level[i]);
    }
    low = __reduce_min_sync(FULL, low) - 1024 * MAX_WIDTH;
    high = __reduce_max_sync(FULL, high);
    while (low < high) {
        const int middle = (low + high + 1) >> 1;
        int count = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) count += min(max((level[i] - middle) >> 10, 0), MAX_WIDTH - 1);
        if (__reduce_add_sync(FULL, count) >= total - DIM) low = middle;
        else high = middle - 1;
    }
    int width[EACH], excess = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const bool mine = i * 32 + lane < DIM;
        width[i] = mine ? 1 + min(max((level[i] - low) >> 10, 0), MAX_WIDTH - 1) : 0;
        excess += width[i];
    }
    excess = __reduce_add_sync(FULL, excess) - total;
#pragma unroll
    for (int i = EACH - 1; i >= 0; --i) {
        const int above = level[i] - low;
        const bool last = width[i] && (above & 1023) == 0 && above >= 1024 && above <= 1024 * (MAX_WIDTH - 1);
        const u32 lasts = __ballot_sync(FULL, last);
        if (last && __popc(lasts >> lane >> 1) < excess) --width[i];
        excess -= __popc(lasts);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (i * 32 + lane < DIM) s.c.width[i * 32 + lane] = width[i];
    __syncwarp();
}

// Four counts as a word that is never zero.
DEVICE u64 counts_word(const u32* count) {
    return 1ull << 63 | (u64)count[3] << 45 | (u64)count[2] << 30 | (u64)count[1] << 15 | count[0];
}
DEVICE u32 count_in(u64 word, int i) { return (u32)(word >> (15 * i)) & 0x7FFF; }

// The code of `u` on [0, 2 · half), as the last bits of 2^23 + code. The exact square root takes ten
// instructions, the hardware's approximation one, and both give the same code unless it lies within
// their distance of the next one. Bounded for any `u`, also one that is no number.
#define TOLERANCE (INVERSE * 7.152557373046875e-7f + 3.5762786865234375e-7f)
DEVICE u32 whole(float place, float half) {
    return __float_as_uint(__fadd_rd(fminf(fmaxf(place, 0.0f), half + half - 1.0f), 8388608.0f));
}
static __device__ __noinline__ u32 exact_code(float u, float half) {
#if CURVED
    const float z = u + u - 1.0f, root = __fsqrt_rn(ONE_LESS_SQUARED + FOUR * fabsf(z));
    return whole((copysignf((root - ONE_LESS) * INVERSE, z) + 1.0f) * half, half);
#else
    return whole((u + u) * half, half);
#endif
}
// `top` = 2^23 + half. `doubt`: not zero when the code may be another one.
DEVICE u32 quick_code(float u, float half, float top, u32& doubt) {
#if CURVED
    const float z = __fmaf_rn(2.0f, u, -1.0f);
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(__fmaf_rn(FOUR, fabsf(z), ONE_LESS_SQUARED)));
    const float size = fminf(__fmaf_rn(root, INVERSE, -ONE_LESS * INVERSE), 1.0f - 2 * TOLERANCE);
    const float place = copysignf(size, z);
    const u32 code = __float_as_uint(__fmaf_rd(place - TOLERANCE, half, top));
    doubt = code ^ __float_as_uint(__fmaf_rd(place + TOLERANCE, half, top));
    return code;
#else
    doubt = 0;
    return whole((u + u) * half, half);
#endif
}

// Bytes `r` of BESIDE channels' words, side by side.
struct Bytes { u32 w[(BESIDE + 3) / 4]; };
DEVICE Bytes bytes_of(const u32 (&word)[MINE], int first, int r) {
    Bytes out;
    const u32 pick = r | (4 + r) << 4;
#pragma unroll
    for (int w = 0; w < (BESIDE + 3) / 4; ++w) {
        const int v = first + 4 * w;
        out.w[w] = BESIDE == 1 ? word[v] >> (8 * r) : __byte_perm(word[v], word[BESIDE == 1 ? v : v + 1], pick);
        if (BESIDE >= 4) out.w[w] = __byte_perm(out.w[w], __byte_perm(word[BESIDE < 4 ? v : v + 2], word[BESIDE < 4 ? v : v + 3], pick), 0x5410);
    }
    return out;
}

// Codes: the anchor's as words that take the place of what they were made from, the residual's to
// where they belong. Keys' powers of two are in s.low and s.factor.
template <bool KEYS> DEVICE void quantize(const Source& source, Shared& s, const float* cos, const float* sin,
                                          int row, int lane, int length, u8* correction) {
    float low[MINE], factor[MINE], half[MINE];
    u32 levels[MINE];  // of the anchor: a multiplication appends a code
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
        const int c = has(lane, e) ? channel_of(lane, e) : 0;
        low[e] = s.low[c], factor[e] = s.factor[c], levels[e] = 1 << s.c.width[c];
        half[e] = power_of_two(s.c.width[c] + RESIDUAL_BITS - 1);
    }
    const int star = s.star, rows = (length * RESIDUAL_BITS + 7) / 8;
#pragma unroll 1
    for (int group = row; group < (length + 7) / 8; group += ROWS) {
        u32 word[2][MINE] = {}, rest[REST_WORDS][MINE] = {};  // 4 tokens' codes, 8 tokens' residuals
#pragma unroll 1
        for (int first = 4; first >= 0; first -= 4) {
            struct Four { float of[4]; };
            const Four by = KEYS ? Four{} : load_as<16, Four>(s.by + group * 8 + first);
            Angles angles[4];
#pragma unroll
            for (int i = 0; KEYS && i < 4; ++i) angles[i] = angles_of(cos, sin, group * 8 + first + i, lane);
#pragma unroll
            for (int e = 0; e < MINE; ++e) word[1][e] = word[0][e], word[0][e] = 0;
#pragma unroll
            for (int i = 3; i >= 0; --i) {
                const int t = group * 8 + first + i;
                float x[MINE];
                load_token(x, source.token(t, length), lane, nullptr);
                if (KEYS) rotate<true>(x, angles[i], lane, s.rows[PAIRED || !PAIRS ? 0 : row]);
                u32 q[MINE], doubt[MINE], any = 0;
#pragma unroll
                for (int e = 0; e < MINE; ++e) {
                    if (!KEYS) x[e] *= by.of[i];
                    x[e] = (x[e] - low[e]) * factor[e];
                    q[e] = quick_code(x[e], half[e], half[e] + 8388608.0f, doubt[e]);
                    any |= doubt[e];
                }
                if (any)
#pragma unroll
                    for (int e = 0; e < MINE; ++e)
                        if (doubt[e]) q[e] = exact_code(x[e], half[e]);
#pragma unroll
                for (int e = 0; e < MINE; ++e) {
                    word[0][e] = word[0][e] * levels[e] + (q[e] >> RESIDUAL_BITS);
                    if (REST_WORDS == 2) rest[REST_WORDS - 1][e] = __funnelshift_l(rest[0][e], rest[REST_WORDS - 1][e], RESIDUAL_BITS);
                    rest[0][e] = rest[0][e] * STEP + (q[e] & (STEP - 1));
                }
            }
        }
        u32 codes[2][MINE];
#pragma unroll
        for (int e = 0; e < MINE; ++e) {
            const u32 n = levels[e], extra = (UNIT >> RESIDUAL_BITS) * (1 + n * (1 + n * (1 + n)));
            const int shift = 4 * (__float_as_int(half[e]) >> 23) - 4 * (126 + RESIDUAL_BITS);  // 4 · width
            codes[0][e] = word[0][e] - extra | __funnelshift_lc(0, word[1][e] - extra, shift);
            codes[1][e] = __funnelshift_lc(word[1][e] - extra, 0, shift);
        }
        if (group == star / 8 || group * 8 + 8 > length)  // tokens that are none, and the row apart
#pragma unroll
            for (int e = 0; e < MINE; ++e) {
                const int c = has(lane, e) ? channel_of(lane, e) : 0, width = s.c.width[c], i = star % 8;
                u64 anchors = (u64)codes[1][e] << 32 | codes[0][e];
                u64 others = (u64)(REST_WORDS == 2 ? rest[REST_WORDS - 1][e] : 0) << 32 | rest[0][e];
                const int there = length - group * 8;
                if (there < 8) {
                    anchors &= (1ull << (there * width)) - 1;
                    others &= (1ull << (there * RESIDUAL_BITS)) - 1;
                }
                if (group == star / 8) {
                    const u64 all = (1ull << width) - 1, rest_all = STEP - 1;
                    anchors = (anchors & ~(all << (i * width))) | (s.row_code[c] >> RESIDUAL_BITS & all) << (i * width);
                    others = (others & ~(rest_all << (i * RESIDUAL_BITS))) | (s.row_code[c] & rest_all) << (i * RESIDUAL_BITS);
                }
                codes[0][e] = (u32)anchors, codes[1][e] = (u32)(anchors >> 32);
                rest[0][e] = (u32)others;
                if (REST_WORDS == 2) rest[REST_WORDS - 1][e] = (u32)(others >> 32);
            }
        __syncwarp(row_lanes());  // all have read what is overwritten now
#pragma unroll
        for (int e = 0; e < MINE; ++e)
            if (has(lane, e)) {
                s.words(group, 0)[channel_of(lane, e)] = codes[0][e];
                s.words(group, 1)[channel_of(lane, e)] = codes[1][e];
            }
#pragma unroll
        for (int r = 0; r < RESIDUAL_BITS; ++r)
            if (group * RESIDUAL_BITS + r < rows)
#pragma unroll
                for (int g = 0; g < APART; ++g)
                    if (has(lane, g * BESIDE))
                        store_as<BESIDE>(correction + (i64)(group * RESIDUAL_BITS + r) * CHANNELS + channel_of(lane, g * BESIDE),
                                         bytes_of(rest[r / 4], g * BESIDE, r % 4));
    }
}

// Bounds of every channel over the tokens but the row's, into s.bottom and s.top.
template <bool KEYS> DEVICE void find_bounds(const Source& source, Shared& s, const float* cos, const float* sin,
                                             int row, int lane, int length, u32* bad) {
    float low[MINE], high[MINE];
    u32 most = 0;
    const int star = s.star;
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
        low[e] = __uint_as_float(0x7F800000u);
        high[e] = -low[e];
    }
#pragma unroll 1
    for (int group = row; group < (length + 7) / 8; group += ROWS) {
        const int there = length - group * 8;
        u32 skip = there < 8 ? ~0u << there : 0;
        if (group == star / 8) skip |= 1u << star % 8;
#pragma unroll 1
        for (int first = group * 8; first < group * 8 + 8; first += 4, skip >>= 4) {
            struct Four { float of[4]; };
            const Four by = KEYS ? Four{} : load_as<16, Four>(s.by + first);
            Angles angles[4];
#pragma unroll
            for (int i = 0; KEYS && i < 4; ++i) angles[i] = angles_of(cos, sin, first + i, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = first + i;
                float x[MINE];
                load_token(x, source.token(t, length), lane, &most);
                if (KEYS) rotate<true>(x, angles[i], lane, s.rows[PAIRED || !PAIRS ? 0 : row]);
                const bool skipped = skip >> i & 1;
#pragma unroll
                for (int e = 0; e < MINE; ++e) {
                    const float y = KEYS ? x[e] : x[e] * by.of[i];
                    low[e] = skipped ? low[e] : fminf(low[e], y);
                    high[e] = skipped ? high[e] : fmaxf(high[e], y);
                }
            }
        }
    }
    most &= ~SIGN_WORD;  // NaN, infinity, or beyond the largest float16?
    if (!(element(PER_WORD == 1 ? most : most & 0xFFFF) <= MAX_ABS &&
          element(PER_WORD == 1 ? most : most >> 16) <= MAX_ABS)) *bad = 1;
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            low[e] = fminf(low[e], __shfl_xor_sync(FULL, low[e], step));
            high[e] = fmaxf(high[e], __shfl_xor_sync(FULL, high[e], step));
        }
        if (threadIdx.x % 32 < LANES && has(lane, e)) {
            atomicMin(&s.bottom[channel_of(lane, e)], in_order(low[e]));
            atomicMax(&s.top[channel_of(lane, e)], in_order(high[e]));
        }
    }
    __syncthreads();
}

// Two nibbles a byte: this head's share of the bytes, from one byte a value.
DEVICE void put_nibbles(u8* to, const u8* from, int count, int head) {
    const int bytes = (count + 1) / 2;
    const int first = (i64)bytes * head / HEADS, end = (i64)bytes * (head + 1) / HEADS;
    for (int i = first + threadIdx.x; i < end; i += THREADS)
        to[i] = __ldcg(from + 2 * i) | (2 * i + 1 < count ? __ldcg(from + 2 * i + 1) << 4 : 0);
}

// The row apart, by one warp: from its own bounds, with 8 bits more than the channels' codes.
DEVICE void put_row(const Source& source, Shared& s, u8* section, int head, int length) {
    const int lane = threadIdx.x % 32, star = s.star;
    typedef Bits<ELEMENT_BYTES>::T Element;
    const Element* from = reinterpret_cast<const Element*>(source.token(star, length));
    float lowest = __uint_as_float(0x7F800000u), highest = -lowest;
    for (int c = lane; c < DIM; c += 32) {
        lowest = fminf(lowest, element(from[c]));
        highest = fmaxf(highest, element(from[c]));
    }
    for (int step = 16; step; step /= 2) {
        lowest = fminf(lowest, __shfl_xor_sync(FULL, lowest, step));
        highest = fmaxf(highest, __shfl_xor_sync(FULL, highest, step));
    }
    const u16 low16 = bf16_down(lowest);
    const float bottom = bf16_to_float(low16);
    const float span = fmaxf(-bf16_to_float(bf16_down(bottom - highest)), MIN_ROW_RANGE);
    for (int c = lane; c < DIM; c += 32) {
        const int bits = s.c.width[c] + RESIDUAL_BITS;
        const float levels = power_of_two(8 + bits);
        const u32 q = (u32)fminf(fmaxf(floorf(divide(element(from[c]) - bottom, span) * levels), 0.0f), levels - 1.0f);
        s.row_code[c] = q & ((1 << bits) - 1);
        section[AT_ROWS + head * DIM + c] = q >> bits;
    }
    if (lane == 0) {
        section[AT_STARS + head] = star;
        section[AT_EXPONENTS + head] = s.exponent;
        put_u16(section + AT_ROW_LOW + 2 * head, low16);
        put_u16(section + AT_ROW_RANGE + 2 * head, __float_as_uint(span) >> 16);
    }
}

// `exchange`: a counter of work taken, then two words for each layer, page, kv and head; zero at
// first. `published`: widths less one [layer, page, kv, channel] and steps [layer, page, token, head].
extern "C" __global__ void __launch_bounds__(THREADS, STAGED && COLUMNS == 1 ? BLOCKS : 1)
encode(CACHE_ARGS, PLAN_ARGS, const float* __restrict__ all_cos, const float* __restrict__ all_sin,
       const u8* __restrict__ table, const signed char* __restrict__ priority, u64* exchange,
       u8* published, Scratch* scratch, u8* __restrict__ anchor, u8* __restrict__ residual)
{
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    extern __shared__ uint4 shared[];
    Shared& s = *reinterpret_cast<Shared*>(shared);
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) s.ticket = atomicAdd(reinterpret_cast<u32*>(exchange), 1);
    __syncthreads();
    const int head = s.ticket % HEADS, place = s.ticket / HEADS, page = place % pages, layer = place / pages;
    const int length = plan.length(page);
    const float* cos = all_cos + (i64)table[layer] * 256 * PAIRS;
    const float* sin = all_sin + (i64)table[layer] * 256 * PAIRS;
#if BLOCK
    for (int t = threadIdx.x; t < length; t += THREADS) {
        s.at[t] = cache.token((i64)page * PAGE + t);
        if (s.at[t] < 0) scratch->bad = 1;
    }
    __syncthreads();
#endif
    u8* steps = published + (i64)layers * pages * KV * CHANNELS + (i64)place * PAGE * HEADS;

#pragma unroll 1
    for (int part = KV - 1; part >= 0; --part) {
        const bool values = KV == 2 && part == 1;
        const int unit = layer * KV + part;
        u8* section = anchor + plan.anchor(layer, part, page);
        u8* widths = published + ((i64)place * KV + part) * CHANNELS;
        Source source = {cache.unit(unit) + (i64)head * cache.d * ELEMENT_BYTES, cache.c * ELEMENT_BYTES, &s};
        if (!BLOCK) source.from += (i64)page * PAGE * source.step;
        stage(source, reinterpret_cast<u8*>(s.tile), length);
        if (values) ask_ahead({cache.unit(unit - 1) + (source.from - cache.unit(unit)), source.step, &s}, length);
        if (part == KV - 1) {  // the row: the token with the smallest values, the first among equals
            sum_squares(source, s, row, lane, length);
            __syncthreads();
            if (warp == 0) {
                u64 best = ~0ull;
                for (int t = threadIdx.x; t < length; t += 32) {
                    const u64 rank = (u64)__float_as_uint(s.squares[t]) << 32 | t;
                    best = rank < best ? rank : best;
                }
                for (int step = 16; step; step /= 2) {
                    const u64 other = __shfl_xor_sync(FULL, best, step);
                    best = other < best ? other : best;
                }
                if (threadIdx.x == 0) s.star = (u32)best;
            }
        }
        if (threadIdx.x == 0) s.exponent = -1000, s.peak = 0;
        for (int c = threadIdx.x; c < DIM; c += THREADS) s.bottom[c] = 0x7FFFFFFF, s.top[c] = 0x80000000;
        if (threadIdx.x < MAX_WIDTH) s.c.all[threadIdx.x] = s.c.before[threadIdx.x] = 0;
        __syncthreads();
        const int star = s.star;
        if (values) {
            for (int t = threadIdx.x; t < length; t += THREADS)
                if (t != star || length == 1)
                    atomicMax(&s.exponent, quarter_exponent(fmaxf(divide(s.squares[t], (float)DIM), MIN_POWER)));
            __syncthreads();
            for (int t = threadIdx.x; t < length; t += THREADS) {
                const int e = quarter_exponent(fmaxf(divide(s.squares[t], (float)DIM), MIN_POWER));
                const int below = t == star ? 0 : min(s.exponent - e, SCALE_STEPS), n = s.exponent - below;
                s.by[t] = inverse_quarters[n & 3] * power_of_two(-(n >> 2));
                steps[t * HEADS + head] = below;
            }
            __syncthreads();
            find_bounds<false>(source, s, cos, sin, row, lane, length, &scratch->bad);
        } else {
            find_bounds<true>(source, s, cos, sin, row, lane, length, &scratch->bad);
        }
        for (int c = threadIdx.x; c < DIM; c += THREADS) {
            if (length == 1) s.bottom[c] = s.top[c] = 0;
            const float bottom = from_order(s.bottom[c]), top = from_order(s.top[c]);
            if (!values) atomicMax(&s.peak, __float_as_uint(fmaxf(fabsf(bottom), fabsf(top))));
        }
        __syncthreads();
        if (!values && threadIdx.x == 0)
            s.exponent = s.peak ? max((int)(s.peak >> 23) - 126, LEAST_EXPONENT) : LEAST_EXPONENT;
        __syncthreads();
        const float scale = values ? 1.0f : power_of_two(-s.exponent);
        for (int c = threadIdx.x; c < DIM; c += THREADS) {
            const int at = head * DIM + c;
            const u16 low16 = half_down(from_order(s.bottom[c]) * scale);
            const float bottom = half_to_float(low16);
            const float span = fmaxf(-half_to_float(half_down(bottom - from_order(s.top[c]) * scale)), MIN_RANGE);
            s.ranges[c] = half_down(span);  // exact
            reinterpret_cast<u16*>(section)[at] = low16;
            reinterpret_cast<u16*>(section + AT_RANGES)[at] = s.ranges[c];
            s.low[c] = values ? bottom : bottom * power_of_two(s.exponent);  // exactly, as is all
            s.factor[c] = divide(1.0f, span) * scale;                       // that follows
        }
        __syncthreads();
        if (warp == 0) {
            set_widths(s, s.ranges, values ? nullptr : priority + ((i64)layer * HEADS + head) * DIM,
                       plan.total(part));
        }
        sort_by_width(s.c, [] {});
        if (warp == WARPS_HERE - 1) put_row(source, s, section, head, length);

        // Widths and steps to the other heads; what they have to say is needed after the codes.
        for (int c = threadIdx.x; c < DIM; c += THREADS) widths[head * DIM + c] = s.c.width[c] - 1;
        __syncthreads();
        volatile u64* counts = exchange + 1 + 2 * HEADS * ((i64)place * KV + part);
        if (threadIdx.x < 2) {
            __threadfence();  // after the barrier: what the block has written is seen before the counts
            counts[2 * head + threadIdx.x] = counts_word(s.c.count + 4 * threadIdx.x);
        }
        u8* correction = residual + plan.residual(layer, part, page);
        if (values) quantize<false>(source, s, cos, sin, row, lane, length, correction + head * DIM);
        else quantize<true>(source, s, cos, sin, row, lane, length, correction + head * DIM);
        for (int h = threadIdx.x; h < 2 * HEADS; h += THREADS) {
            u64 found;
            while (!(found = counts[h])) __nanosleep(20);
            for (int i = 0; i < 4; ++i) {
                const u32 n = count_in(found, i);
                if (n) atomicAdd(&s.c.all[h % 2 * 4 + i], n);
                if (n && h / 2 < head) atomicAdd(&s.c.before[h % 2 * 4 + i], n);
            }
            __threadfence();
        }
        __syncthreads();
        place_planes(s.c, values, length);
        __syncthreads();
        put_nibbles(section + AT_WIDTHS, widths, CHANNELS, head);
        if (values) put_nibbles(section + AT_STEPS, steps, length * HEADS, head);
        const int groups = (length + 7) / 8;
        for_columns(s.c, [&](int c, int width, int j, u32 start, u32 step) {
            const u8* from = reinterpret_cast<const u8*>(s.words(0, j / 4) + c) + j % 4;
            u8* to = section + start;
#pragma unroll 8
            for (int group = 0; group < groups; ++group) {
                *to = *from;
                from += 8 * DIM * (STAGED ? ELEMENT_BYTES : 1);
                to += step;
            }
        });
        if (head == 0 && threadIdx.x == 0) {  // zeros to a multiple of 8
            const int end = plan.anchor_bytes(part, page);
            for (int at = at_planes(values, length) + groups * HEADS * plan.total(part); at < end; ++at) section[at] = 0;
            for (int at = CHANNELS * ((length * RESIDUAL_BITS + 7) / 8); at % 8; ++at) correction[at] = 0;
        }
        __syncthreads();
    }
}
