// Where a cache's elements lie. Compiled with HEADS, DIM (channels = HEADS * DIM, VEC divides DIM)
// and BLOCK: 0 for a tensor [kv, layers, tokens, heads, dim] of any strides, else the tokens of a
// page of a paged cache.
#define CHANNELS (HEADS * DIM)
#define GROUPS (CHANNELS / VEC)  // vectors of a token

// A tensor: where = address; a, b, c, d = elements between kv, layers, tokens, heads.
// Pages:    where = address of the units' addresses [layers * kv]; slots [tokens]; a = elements
//           between blocks, b = number of slots, c, d = elements between tokens, heads.
#define CACHE_ARGS u64 where, const i64* __restrict__ slots, i64 a, i64 b, i64 c, i64 d, int kv
#define CACHE {where, slots, a, b, c, d, kv}

struct Cache {
    u64 where;
    const i64* slots;
    i64 a, b, c, d;
    int kv;

    DEVICE_MEMBER u8* unit(int number) const {
#if BLOCK
        u8* at = reinterpret_cast<u8*>(reinterpret_cast<const u64*>(where)[number]);
        __builtin_assume(__isGlobal(at));
        return at;
#else
        i64 at = (number % kv) * a + (number / kv) * b;
        return reinterpret_cast<u8*>(where) + at * ELEMENT_BYTES;
#endif
    }
    // Elements from a unit's start to a token; negative when the token has no slot.
    DEVICE_MEMBER i64 token(i64 t) const {
#if BLOCK
        return place(slots[t]);
#else
        return t * c;
#endif
    }
#if BLOCK
    DEVICE_MEMBER i64 place(u64 slot) const {
        const i64 at = (u32)slot / BLOCK * a + (u32)slot % BLOCK * c;
        return slot < (u64)b ? at : -1;
    }
#endif
    // Elements from a token's start to a channel.
    DEVICE_MEMBER i64 channel(int number) const { return number / DIM * d + number % DIM; }
};
