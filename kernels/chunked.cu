// The profiles `linear` and `paper`. Compiled with
//   PAPER 0 | 1;  ANCHOR_BITS, RESIDUAL_BITS;  CHUNK, PAGE tokens;  RUN = gcd(CHUNK, 8);
//   UNIFORM 0 | 1;  SCALE: the grid's;  EXACT: most exact tokens;  SINK_RATIO, SINK_SHARE of 16.
//
// A block of the encoder is one page of 8 * VEC channels: thread (row, lane) keeps 8 tokens of VEC
// channels in registers from the only reading to the writing, and 8 tokens of b bits are b bytes, so
// that no byte has two writers. A thread of the decoder has VEC channels of SPAN tokens.
#define LANES 8
#define ROWS (PAGE / 8)
#define TILE (LANES * VEC)
#define TILES ((GROUPS + LANES - 1) / LANES)
#define RUNS (PAGE / RUN)
#define CHUNKS (PAGE / CHUNK)
#define LEVELS (((1 << ANCHOR_BITS) - 1) << RESIDUAL_BITS)
#define BIAS ((1 << RESIDUAL_BITS) / 2 > 1 ? (1 << RESIDUAL_BITS) / 2 - 1 : 0)
#define SPAN (CHUNK % 32 == 0 ? 32 : CHUNK % 16 == 0 ? 16 : 8)
#define MOST_EXACT (EXACT ? EXACT : 1)

struct Plan {
    int units, pages, last;
    i64 anchor_page, anchor_unit, residual_page, residual_unit, exact_offset;

    DEVICE_MEMBER int length(int page) const { return page == pages - 1 ? last : PAGE; }
    DEVICE_MEMBER i64 anchor(int unit, int page) const {
        return unit * anchor_unit + page * anchor_page;
    }
    DEVICE_MEMBER i64 residual(int unit, int page) const {
        return unit * residual_unit + page * residual_page;
    }
};
#define PLAN_ARGS int units, int pages, int last, i64 anchor_page, i64 anchor_unit, \
    i64 residual_page, i64 residual_unit, i64 exact_offset
#define PLAN {units, pages, last, anchor_page, anchor_unit, residual_page, residual_unit, exact_offset}

DEVICE int chunks_of(int length) { return (length + CHUNK - 1) / CHUNK; }
DEVICE int rows_of(int length, int bits) { return (length * bits + 7) / 8; }
DEVICE float clip(float x, float most) { return fminf(fmaxf(x, 0.0f), most); }

// Where the 8 tokens of a page from `first` on lie, of those below `length`, in bytes from the unit's
// start. All are asked for before one is used. False when one has no slot; its place is negative.
DEVICE bool find_tokens(i64 (&at)[8], const Cache& cache, int page, int first, int length) {
    bool all = true;
#if BLOCK
    u64 slot[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) slot[i] = first + i < length ? cache.slots[(i64)page * PAGE + first + i] : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        at[i] = cache.place(slot[i]) * ELEMENT_BYTES;
        all &= at[i] >= 0;
    }
#else
    at[0] = ((i64)page * PAGE + first) * cache.c * ELEMENT_BYTES;
#pragma unroll
    for (int i = 1; i < 8; ++i) at[i] = at[i - 1] + cache.c * ELEMENT_BYTES;
#endif
    return all;
}

// Tokens of a page that a thread keeps: 8 from the row's first on, those below `length`.
DEVICE void load_rows(Pack (&x)[8], const Cache& cache, int unit, int page, int length, int row,
                      int channel, bool active, u32* bad) {
    const u8* from = cache.unit(unit) + cache.channel(channel) * ELEMENT_BYTES;
#if BLOCK
    i64 at[8];
    if (!find_tokens(at, cache, page, row * 8, active ? length : 0)) *bad = 1;
#endif
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[i] = Pack{};
#if BLOCK
        if (active && row * 8 + i < length && at[i] >= 0) x[i] = load_pack(from + at[i]);
#else
        if (active && row * 8 + i < length) {  // of a branch for each, ptxas makes the faster code
            const i64 at = cache.token((i64)page * PAGE + row * 8 + i);
            if (at < 0) *bad = 1;
            else x[i] = load_pack(from + at * ELEMENT_BYTES);
        }
#endif
    }
}

// -- attention sinks -------------------------------------------------------------------------------

// From each token's count of small key channels to the exact tokens: the last block's job.
DEVICE void choose_sinks(Scratch* s, u32* counts, i64 tokens, i64 looked_at) {
    __shared__ u64 best;
    int found = 0;
    for (; found < EXACT; ++found) {
        if (threadIdx.x == 0) best = 0;
        __syncthreads();
        u64 mine = 0;
        for (i64 t = threadIdx.x; t < tokens; t += blockDim.x) {
            u32 count = counts[t];
            if ((i64)count * SINK_SHARE_OF < SINK_SHARE * looked_at) continue;
            u64 rank = (u64)count << 32 | (0xFFFFFFFFu - (u32)t);
            mine = rank > mine ? rank : mine;
        }
        if (mine) atomicMax(&best, mine);
        __syncthreads();
        if (!best) break;
        if (threadIdx.x == 0) {
            u32 token = 0xFFFFFFFFu - (u32)best;
            counts[token] = 0;
            int i = found;
            for (; i > 0 && s->index[i - 1] > token; --i) s->index[i] = s->index[i - 1];
            s->index[i] = token;
        }
        __syncthreads();
    }
    for (i64 t = threadIdx.x; t < tokens; t += blockDim.x) counts[t] = 0;
    if (threadIdx.x == 0) s->exact = found;
}

extern "C" __global__ void __launch_bounds__(PAGE) sinks(
    CACHE_ARGS, PLAN_ARGS, i64 tokens, int layer_step, int layers_looked_at, Scratch* s)
{
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    extern __shared__ uint4 shared[];
    u8* sizes = reinterpret_cast<u8*>(shared);  // [PAGE][LANES] packs
    __shared__ float total[TILE];
    __shared__ u32 small[PAGE];
    __shared__ bool is_last;
    u32* counts = s->counts;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    const int tile = blockIdx.x % TILES, page = blockIdx.x / TILES % pages;
    const int unit = blockIdx.x / TILES / pages * layer_step * kv;
    const int group = tile * LANES + lane, length = plan.length(page);
    const bool active = group < GROUPS;

    Pack x[8];
    load_rows(x, cache, unit, page, length, row, group * VEC, active, &s->bad);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) x[i].w[w] &= ~SIGN_WORD;
        store_pack(sizes + ((row * 8 + i) * LANES + lane) * (VEC * ELEMENT_BYTES), x[i]);
    }
    small[threadIdx.x] = 0;
    __syncthreads();
    for (int at = threadIdx.x; at < TILE; at += PAGE) {
        float sum = 0;
#pragma unroll 16
        for (int t = 0; t < length; ++t) {  // in token order, as float addition has an order
#if DTYPE == 2
            sum += element(reinterpret_cast<const u32*>(sizes)[t * TILE + at]);
#else
            sum += element(reinterpret_cast<const u16*>(sizes)[t * TILE + at]);
#endif
        }
        total[at] = sum;
    }
    __syncthreads();
    const float factor = (float)(SINK_RATIO * length);
    if (active) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 count = 0;
#pragma unroll
            for (int v = 0; v < VEC; ++v) count += get(x[i], v) * factor < total[lane * VEC + v];
            if (count && row * 8 + i < length) atomicAdd(&small[row * 8 + i], count);
        }
    }
    __syncthreads();
    if (small[threadIdx.x]) atomicAdd(&counts[(i64)page * PAGE + threadIdx.x], small[threadIdx.x]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&s->done, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    choose_sinks(s, counts, tokens, (i64)layers_looked_at * CHANNELS);
    if (threadIdx.x == 0) s->done = 0;
}

// -- encode ----------------------------------------------------------------------------------------

// Shared memory of the encoder.
struct Bounds {
    Pack low[RUNS][LANES], high[RUNS][LANES];  // of each run of RUN tokens
};
struct Scales {
    float low[CHUNKS][TILE], high[CHUNKS][TILE];        // chunk bounds; then offset and factor
    float page_low[TILE], per_unit[TILE], unit[TILE];
};

DEVICE float bound(const Pack* of_run, int channel) {
    const u8* at = reinterpret_cast<const u8*>(of_run + channel / VEC) + channel % VEC * ELEMENT_BYTES;
#if DTYPE == 2
    return element(*reinterpret_cast<const u32*>(at));
#else
    return element(*reinterpret_cast<const u16*>(at));
#endif
}

#if !UNIFORM
DEVICE u32 code_of(float v, const float* thresholds, const u8* codes) {
    int n = 0;
#pragma unroll
    for (int step = 128; step; step /= 2) n += thresholds[n + step - 1] <= v ? step : 0;
    return codes[n];
}
#endif

#if PAPER
// Mean place of every chunk, summed in token order, and the largest distance from it.
DEVICE void mean_scales(const Pack (&x)[8], u32 kept, int row, int lane, bool active, Scales& s,
                        const u32* kept_of_chunk) {
    for (int at = threadIdx.x; at < CHUNKS * TILE; at += PAGE) (&s.low[0][0])[at] = 0;
    __syncthreads();
    for (int turn = 0; turn < ROWS; ++turn) {
        if (turn == row && active) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (kept >> i & 1)
                    for (int v = 0; v < VEC; ++v) {
                        const int at = lane * VEC + v;
                        s.low[(row * 8 + i) / CHUNK][at] +=
                            (get(x[i], v) - s.page_low[at]) * s.per_unit[at];
                    }
        }
        __syncthreads();
    }
    for (int at = threadIdx.x; at < CHUNKS * TILE; at += PAGE) {
        u32 n = kept_of_chunk[at / TILE];
        float& mean = (&s.low[0][0])[at];
        mean = n ? rintf(divide(mean, (float)n)) : 0.0f;
        (&s.high[0][0])[at] = 0;
    }
    __syncthreads();
    if (active) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (kept >> i & 1)
                for (int v = 0; v < VEC; ++v) {
                    const int at = lane * VEC + v, k = (row * 8 + i) / CHUNK;
                    float place = (get(x[i], v) - s.page_low[at]) * s.per_unit[at];
                    atomicMax(reinterpret_cast<int*>(&s.high[k][at]),
                              __float_as_int(fabsf(place - s.low[k][at])));
                }
    }
    __syncthreads();
}
#endif

extern "C" __global__ void __launch_bounds__(PAGE, ENCODE_BLOCKS) encode(CACHE_ARGS, PLAN_ARGS, int layers, Scratch* s, const float* __restrict__ grid_thresholds,
       const u8* __restrict__ grid_codes, u8* __restrict__ anchor, u8* __restrict__ residual)
{
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    extern __shared__ uint4 shared[];
    Bounds& bounds = *reinterpret_cast<Bounds*>(shared);
    Scales& scales = *reinterpret_cast<Scales*>(reinterpret_cast<u8*>(shared) + sizeof(Bounds));
#if !UNIFORM
    __shared__ float thresholds[255];
    __shared__ u8 codes[256];
    for (int i = threadIdx.x; i < 256; i += PAGE) {
        codes[i] = grid_codes[i];
        if (i < 255) thresholds[i] = grid_thresholds[i];
    }
#endif
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    const int tile = blockIdx.x % TILES, page = blockIdx.x / TILES % pages;
    const int unit = blockIdx.x / TILES / pages;
    const int group = tile * LANES + lane, length = plan.length(page), used = chunks_of(length);
    const int channel = group * VEC;
    const bool active = group < GROUPS;
    const i64 first = (i64)page * PAGE + row * 8;  // this thread's first token

    Pack x[8];
    load_rows(x, cache, unit, page, length, row, channel, active, &s->bad);
    const int mine = length - row * 8;
    u32 there = mine >= 8 ? 255u : mine > 0 ? (1u << mine) - 1 : 0u;
    u32 kept = there;
#if EXACT
    const int exact = s->exact;
    for (int i = 0; i < exact; ++i) {
        i64 at = (i64)s->index[i] - first;
        if (at < 0 || at >= 8) continue;
        kept &= ~(1u << at);
        if (!active) continue;
        u8* to = anchor + exact_offset + 4 * exact +
            (((i64)i * layers + unit / kv) * kv + unit % kv) * CHANNELS * ELEMENT_BYTES;
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (k == at)
                for (int v = 0; v < VEC; ++v) {
                    u32 bits = element_bits(x[k], v);
                    if (!(fabsf(get(x[k], v)) < __uint_as_float(0x7F800000u))) s->bad = 1;
#if DTYPE == 2
                    reinterpret_cast<u32*>(to)[channel + v] = bits;
#else
                    reinterpret_cast<u16*>(to)[channel + v] = (u16)bits;
#endif
                }
    }
    if (blockIdx.x == 0 && threadIdx.x < exact)
        reinterpret_cast<u32*>(anchor + exact_offset)[threadIdx.x] = s->index[threadIdx.x];
#endif

    // Bounds of every run, of every chunk, of the page.
#pragma unroll
    for (int run = 0; run < 8 / RUN; ++run) {
        Pack low, high;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            low.w[w] = INFINITY_WORD;
            high.w[w] = INFINITY_WORD | SIGN_WORD;
        }
#pragma unroll
        for (int i = run * RUN; i < (run + 1) * RUN; ++i)
            if (kept >> i & 1) {
#pragma unroll
                for (int w = 0; w < WORDS; ++w) {
                    low.w[w] = smaller(low.w[w], x[i].w[w]);
                    high.w[w] = larger(high.w[w], x[i].w[w]);
                }
            }
        bounds.low[row * (8 / RUN) + run][lane] = low;
        bounds.high[row * (8 / RUN) + run][lane] = high;
    }
    __syncthreads();
    const float infinity = __uint_as_float(0x7F800000u);
    for (int at = threadIdx.x; at < used * TILE; at += PAGE) {
        const int k = at / TILE, of = at % TILE;
        float low = infinity, high = -infinity;
        bool nan = false;
#pragma unroll
        for (int run = 0; run < CHUNK / RUN; ++run) {
            float l = bound(bounds.low[k * (CHUNK / RUN) + run], of);
            float h = bound(bounds.high[k * (CHUNK / RUN) + run], of);
            nan |= l != l;
            low = fminf(low, l);
            high = fmaxf(high, h);
        }
        const bool empty = low > high;  // every token of the chunk is exact
        if (nan || (!empty && !(low >= -MAX_ABS && high <= MAX_ABS)))
            if (tile * TILE + of < CHANNELS) s->bad = 1;
        scales.low[k][of] = low;
        scales.high[k][of] = high;
    }
    __syncthreads();
    u8* section = anchor + plan.anchor(unit, page);
    for (int of = threadIdx.x; of < TILE; of += PAGE) {
        float low = infinity, high = -infinity;
        for (int k = 0; k < used; ++k) {
            low = fminf(low, scales.low[k][of]);
            high = fmaxf(high, scales.high[k][of]);
        }
        if (low > high) low = high = 0;  // every token of the page is exact
        const u16 low16 = half_down(low), high16 = half_up(high);
        const int at = tile * TILE + of;
        if (at < CHANNELS) {
            reinterpret_cast<u16*>(section)[at] = low16;
            reinterpret_cast<u16*>(section)[CHANNELS + at] = high16;
        }
        low = half_to_float(low16);
        const float width = half_to_float(high16) - low;
        scales.page_low[of] = low;
        scales.per_unit[of] = width > 0 ? divide(255.0f, width) : 0.0f;
        scales.unit[of] = divide(width, 255.0f);
    }
    __syncthreads();
#if PAPER
    __shared__ u32 kept_of_chunk[CHUNKS];
    for (int k = threadIdx.x; k < CHUNKS; k += PAGE) {
        const int end = min(length, (k + 1) * CHUNK);
        int n = max(0, end - k * CHUNK);
        for (int i = 0; i < (EXACT ? (int)s->exact : 0); ++i) {
            i64 at = (i64)s->index[i] - (i64)page * PAGE;
            n -= at >= k * CHUNK && at < end;
        }
        kept_of_chunk[k] = n;
    }
    mean_scales(x, kept, row, lane, active, scales, kept_of_chunk);
#endif
    for (int at = threadIdx.x; at < used * TILE; at += PAGE) {
        const int k = at / TILE, of = at % TILE;
        const float low = scales.page_low[of], unit_width = scales.unit[of];
        float base, span;
#if PAPER
        base = clip(scales.low[k][of], 255.0f);
        span = clip(ceilf(scales.high[k][of]), 255.0f);
        const float steps = span;
#else
        const bool empty = scales.low[k][of] > scales.high[k][of];
        base = empty ? 0.0f : clip(floorf((scales.low[k][of] - low) * scales.per_unit[of]), 255.0f);
        span = empty ? 0.0f : clip(ceilf((scales.high[k][of] - low) * scales.per_unit[of]), 255.0f);
        const float steps = span - base;
#endif
        const int to = tile * TILE + of;
        if (to < CHANNELS) {
            section[(i64)CHANNELS * (4 + k) + to] = (u8)(u32)base;
            section[(i64)CHANNELS * (4 + used + k) + to] = (u8)(u32)span;
        }
        const float wide = steps * unit_width;
        scales.low[k][of] = low + base * unit_width;
        scales.high[k][of] = wide > 0 ? divide(SCALE, wide) : 0.0f;
    }
    __syncthreads();

    // Codes, four channels a word, and from them rows of the planes.
    Codes upper[ANCHOR_BITS], lower[RESIDUAL_BITS ? RESIDUAL_BITS : 1];
#pragma unroll
    for (int w = 0; w < CODE_WORDS; ++w) {
        constexpr int FOUR = VEC < 4 ? VEC : 4;
        struct Four { float of[FOUR]; };
        Four offset, factor;
        u32 word[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i % RUN == 0) {
                const int k = (row * 8 + i) / CHUNK;
                offset = load_as<4 * FOUR, Four>(&scales.low[k][lane * VEC + 4 * w]);
                factor = load_as<4 * FOUR, Four>(&scales.high[k][lane * VEC + 4 * w]);
            }
            u32 q[4] = {};
#pragma unroll
            for (int v = 0; v < FOUR; ++v) {
                const float value = (get(x[i], 4 * w + v) - offset.of[v]) * factor.of[v];
#if UNIFORM
                q[v] = __float_as_uint(clip(value, (float)LEVELS) + 8388608.0f);
#else
                q[v] = code_of(value, thresholds, codes);
#endif
            }
            const u32 joined = join_bytes(q[0], q[1], q[2], q[3]);
            word[i] = (kept >> i & 1 ? joined : 0u) + in_each_byte(BIAS);
            if (!(there >> i & 1)) word[i] = 0;
        }
        u32 rest[RESIDUAL_BITS ? RESIDUAL_BITS : 1], rows[ANCHOR_BITS];
        pack_rows<RESIDUAL_BITS>(word, rest);
#pragma unroll
        for (int i = 0; i < 8; ++i) word[i] = word[i] >> RESIDUAL_BITS & in_each_byte((1u << ANCHOR_BITS) - 1);
        pack_rows<ANCHOR_BITS>(word, rows);
#pragma unroll
        for (int r = 0; r < ANCHOR_BITS; ++r) upper[r].w[w] = rows[r];
#pragma unroll
        for (int r = 0; r < RESIDUAL_BITS; ++r) lower[r].w[w] = rest[r];
    }
    const i64 codes_at = (i64)CHANNELS * (4 + 2 * used);
    u8* correction = residual + plan.residual(unit, page);
    const int anchor_rows = rows_of(length, ANCHOR_BITS), residual_rows = rows_of(length, RESIDUAL_BITS);
    if (active) {
        u8* to = section + codes_at + (i64)(row * ANCHOR_BITS) * CHANNELS + channel;
#pragma unroll
        for (int r = 0; r < ANCHOR_BITS; ++r)
            if (row * ANCHOR_BITS + r < anchor_rows) store_codes(to + r * CHANNELS, upper[r]);
        to = correction + (i64)(row * RESIDUAL_BITS) * CHANNELS + channel;
#pragma unroll
        for (int r = 0; r < RESIDUAL_BITS; ++r)
            if (row * RESIDUAL_BITS + r < residual_rows) store_codes(to + r * CHANNELS, lower[r]);
    }
    if (tile == 0 && threadIdx.x == 0) {  // zeros to a multiple of 16
        for (i64 at = codes_at + (i64)anchor_rows * CHANNELS; at % 16; ++at) section[at] = 0;
        for (i64 at = (i64)residual_rows * CHANNELS; at % 16; ++at) correction[at] = 0;
    }
}

// -- decode ----------------------------------------------------------------------------------------

// A channel's offset and factor in one chunk.
DEVICE void chunk_scales(const u8* section, int used, int k, int channel, const float (&low)[VEC],
                         const float (&unit)[VEC], float (&offset)[VEC], float (&factor)[VEC]) {
    Codes base = load_codes(section + (i64)CHANNELS * (4 + k) + channel);
    Codes span = load_codes(section + (i64)CHANNELS * (4 + used + k) + channel);
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        float b = byte_to_float(base.w[v / 4], v % 4), steps = byte_to_float(span.w[v / 4], v % 4);
        if (!PAPER) steps -= b;
        offset[v] = low[v] + b * unit[v];
        factor[v] = divide(steps * unit[v], SCALE);
    }
}

// One plane's rows of 8 tokens, as words of four channels.
template <int BITS> DEVICE void load_plane(u32 (&rows)[CODE_WORDS][BITS ? BITS : 1], const u8* plane,
                                           int first, int end, int channel) {
#pragma unroll
    for (int r = 0; r < BITS; ++r) {
        Codes found = {};
        if (first + r < end) found = load_codes(plane + (i64)(first + r) * CHANNELS + channel);
#pragma unroll
        for (int w = 0; w < CODE_WORDS; ++w) rows[w][r] = found.w[w];
    }
}

template <bool BOTH> DEVICE void decode(
    const Cache& cache, const Plan& plan, const u8* __restrict__ anchor,
    const u8* __restrict__ residual, int exact, const float* __restrict__ grid_values,
    const u32* gate)
{
#if !UNIFORM
    __shared__ float values[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) values[i] = grid_values[i];
    __syncthreads();
#endif
    if (gate && *gate) return;
    constexpr int SPANS = (PAGE + SPAN - 1) / SPAN;
    const i64 number = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const int channel = number % GROUPS * VEC;
    const i64 rest = number / GROUPS;
    const int span = rest % SPANS, page = (u32)(rest / SPANS) % (u32)plan.pages;
    const int unit = (u32)(rest / SPANS) / (u32)plan.pages;
    if (unit >= plan.units) return;
    const int length = plan.length(page), used = chunks_of(length);
    if (span * SPAN >= length) return;
    const u8* section = anchor + plan.anchor(unit, page);
    const u8* plane = section + (i64)CHANNELS * (4 + 2 * used);
    const u8* correction = residual + plan.residual(unit, page);
    u8* to = cache.unit(unit) + cache.channel(channel) * ELEMENT_BYTES;
    const u32* indices = reinterpret_cast<const u32*>(anchor + plan.exact_offset);

    float low[VEC], width[VEC], offset[VEC], factor[VEC];
    struct Halves { u32 w[(VEC + 1) / 2]; };
    Halves low16 = load_as<2 * VEC, Halves>(section + 2 * channel);
    Halves high16 = load_as<2 * VEC, Halves>(section + 2 * (CHANNELS + channel));
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        low[v] = half_to_float(low16.w[v / 2] >> (16 * (v & 1)));
        width[v] = divide(half_to_float(high16.w[v / 2] >> (16 * (v & 1))) - low[v], 255.0f);
    }
    if (RUN == 8) chunk_scales(section, used, span * SPAN / CHUNK, channel, low, width, offset, factor);
    constexpr int B = BOTH ? RESIDUAL_BITS : 0;
    const int anchor_rows = rows_of(length, ANCHOR_BITS), residual_rows = rows_of(length, B);
    u32 upper[SPAN / 8][CODE_WORDS][ANCHOR_BITS], lower[SPAN / 8][CODE_WORDS][B ? B : 1];
#pragma unroll
    for (int g = 0; g < SPAN / 8; ++g) {
        const int eight = span * (SPAN / 8) + g;
        load_plane<ANCHOR_BITS>(upper[g], plane, eight * ANCHOR_BITS, anchor_rows, channel);
        load_plane<B>(lower[g], correction, eight * B, residual_rows, channel);
    }
#pragma unroll
    for (int g = 0; g < SPAN / 8; ++g) {
        const int start = span * SPAN + g * 8;
        if (start >= length) break;
        u32 raw = 0;
        for (int e = 0; e < exact; ++e) {
            i64 at = (i64)indices[e] - ((i64)page * PAGE + start);
            if (at >= 0 && at < 8) raw |= 1u << at;
        }
        i64 places[8];
        find_tokens(places, cache, page, start, length);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int t = start + i;
            if (RUN < 8 && i % RUN == 0 && t < length)
                chunk_scales(section, used, t / CHUNK, channel, low, width, offset, factor);
            float x[VEC];
#pragma unroll
            for (int w = 0; w < CODE_WORDS; ++w) {
                u32 q = unpack_row<ANCHOR_BITS>(upper[g][w], i) << RESIDUAL_BITS;
                if (B) {
                    q |= unpack_row<B>(lower[g][w], i);
                    const u32 bias = in_each_byte(BIAS), high = 0x80808080u;
                    q = ((q | high) - bias) ^ (~q & high);  // byte by byte, wrapping around
                }
#pragma unroll
                for (int v = 4 * w; v < VEC && v < 4 * w + 4; ++v) {
#if UNIFORM
                    x[v] = offset[v] + byte_to_float(q, v - 4 * w) * factor[v];
#else
                    x[v] = offset[v] + values[q >> (8 * (v - 4 * w)) & 255] * factor[v];
#endif
                }
            }
            if (t >= length || places[i] < 0) continue;
#if DTYPE == 1
#pragma unroll
            for (int v = 0; v < VEC; ++v) x[v] = fminf(fmaxf(x[v], -MAX_ABS), MAX_ABS);
#endif
            Pack out = to_pack(x);
            if (raw >> i & 1) {
                int e = 0;
                while (indices[e] != (u32)(page * PAGE + t)) ++e;
                const int layers = plan.units / cache.kv;
                const u8* from = anchor + plan.exact_offset + 4 * exact +
                    ((((i64)e * layers + unit / cache.kv) * cache.kv + unit % cache.kv) * CHANNELS + channel) *
                        ELEMENT_BYTES;
                out = Pack{};
                for (int v = 0; v < VEC; ++v)
#if DTYPE == 2
                    reinterpret_cast<u32*>(&out)[v] = reinterpret_cast<const u32*>(from)[v];
#else
                    reinterpret_cast<u16*>(&out)[v] = reinterpret_cast<const u16*>(from)[v];
#endif
            }
            store_pack(to + places[i], out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) decode_anchor(
    CACHE_ARGS, PLAN_ARGS, const u8* __restrict__ anchor, const u8* __restrict__ residual, int exact,
    const float* __restrict__ grid_values, const u32* gate)
{
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    decode<false>(cache, plan, anchor, residual, exact, grid_values, gate);
}

extern "C" __global__ void __launch_bounds__(256) decode_both(
    CACHE_ARGS, PLAN_ARGS, const u8* __restrict__ anchor, const u8* __restrict__ residual, int exact,
    const float* __restrict__ grid_values, const u32* gate)
{
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    decode<true>(cache, plan, anchor, residual, exact, grid_values, gate);
}

// -- verify ----------------------------------------------------------------------------------------

// Checks that an anchor's scales and indices are such as an encoder writes, and the digests. The
// verdict: see digest.cu.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1)) verify(
    PLAN_ARGS, i64 tokens, int exact, const u8* anchor, i64 anchor_bytes, u64 anchor_digest,
    const u8* residual, i64 residual_bytes, u64 residual_digest, u64* digests, Scratch* s, u32* gate,
    u64* record)
{
    const Plan plan = PLAN;
    const i64 blocks = blocks_of(anchor_bytes) + blocks_of(residual_bytes);
    const i64 warp = (blockIdx.x - blocks) * (WARPS + 1) + threadIdx.x / 32;
    if (blockIdx.x >= blocks && warp < (i64)units * pages) {
        const u16* scales = reinterpret_cast<const u16*>(anchor + plan.anchor(warp / pages, warp % pages));
        for (int c = threadIdx.x % 32; c < CHANNELS; c += 32) {
            float low = half_to_float(scales[c]), high = half_to_float(scales[CHANNELS + c]);
            if (!(-MAX_ABS <= low && low <= high && high <= MAX_ABS)) atomicOr(&s->bad, WRONG_SCALES);
        }
    }
    if (blockIdx.x == blocks && (int)threadIdx.x < exact) {
        const u32* index = reinterpret_cast<const u32*>(anchor + exact_offset);
        const int i = threadIdx.x;
        if (index[i] >= tokens || (i && index[i] <= index[i - 1])) atomicOr(&s->bad, WRONG_INDICES);
    }
    verdict(anchor, anchor_bytes, anchor_digest, residual, residual_bytes, residual_digest, digests, s,
            gate, record);
}
