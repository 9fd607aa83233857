// llm_runtime::PagedAttention and llm_runtime::QuantizedPagedAttention, ONNX Runtime custom operators for CPUs.
//
// Attention of ragged rows over keys and values that lie in pages (Kwon et al. 2023, arXiv 2309.06180), with the
// online softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135) and Flash-Decoding's split over the context.
//
// The story of one call:
//   plan      The calling thread checks every shape and page id, then cuts the rows into items that need nothing from
//             each other: a block of a row's queries x a range of its keys x a few key heads. How a row is cut depends
//             on that row alone, never on the other rows or on the number of threads, so its result does not either.
//   work      ONNX Runtime's own threads take items until none is left. An item of one query (decode) runs `decode`,
//             which is bound by reading keys and values once; an item of many (prefill) runs `prefill`, which is
//             bound by arithmetic. Both handle all query heads of a key head together.
//   merge     Items that share queries leave partial sums; whoever finishes last adds them up, in the order of the keys.
//
// Softmax works in base 2: queries are scaled by scale * log2(e) once, so a probability is exp2(score - maximum).
//
// Pages are float32, or quantized: int8 or FP8 E4M3 with a scale for every 32 values of a head, in front of them, so that
// a token is read in one piece and none depends on another (keys have channels far larger than the rest: one scale for a
// whole head costs eight times the error). QuantizedPagedAttention also rounds the new
// keys and values, and attends to what it rounded them to: no result depends on how a prompt was cut into steps.
// `decode` widens quantized values as it reads them, `prefill` a block of keys and values at a time.

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The part of ONNX Runtime's C API that is used here. OrtApi is a table of functions whose order never changes, only
// grows (include/onnxruntime/core/session/onnxruntime_c_api.h; the sizes asserted per version at the end of
// onnxruntime/core/session/onnxruntime_c_api.cc pin the positions below). Version 17, of ONNX Runtime 1.17, is the
// first with ParallelFor.

enum { ORT_API_USED = 17 };
enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };  // OrtErrorCode
enum { ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_INT32 = 6 };  // ONNXTensorElementDataType

enum {
  API_CREATE_STATUS = 0,
  API_CREATE_CUSTOM_OP_DOMAIN = 26,
  API_CUSTOM_OP_DOMAIN_ADD = 27,
  API_ADD_CUSTOM_OP_DOMAIN = 28,
  API_GET_TENSOR_MUTABLE_DATA = 51,
  API_GET_DIMENSIONS_COUNT = 61,
  API_GET_DIMENSIONS = 62,
  API_GET_TENSOR_TYPE_AND_SHAPE = 65,
  API_KERNEL_INFO_GET_FLOAT = 85,
  API_KERNEL_INFO_GET_INT64 = 86,
  API_CONTEXT_GET_INPUT = 90,
  API_CONTEXT_GET_OUTPUT = 91,
  API_RELEASE_SHAPE = 99,
  API_CONTEXT_PARALLEL_FOR = 274,
};

typedef void (*OrtFunction)(void);
typedef OrtFunction OrtApi;  // the first entry of the table
typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtShape OrtShape;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;

typedef struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
} OrtApiBase;

typedef struct OrtCustomOp OrtCustomOp;
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  // Null. No shape inference: ONNX Runtime hands unnamed unknown dimensions over as -1 and then rejects them.
  OrtStatus* (*InferOutputShape)(const OrtCustomOp*, void*);
  void (*later_fields[6])(void);  // null: start and end version, in-place and alias maps
};

#define CALL(api, index, result, ...) ((result(*)(__VA_ARGS__))(api)[index])

static OrtStatus* make_status(const OrtApi* api, int code, const char* message) {
  return CALL(api, API_CREATE_STATUS, OrtStatus*, int, const char*)(code, message);
}

// ---------------------------------------------------------------------------------------------------------------------
// Vectors of the machine's width

#if defined(__AVX512F__)
enum { LANES = 16, QUERY_TILE = 4, TOKEN_TILE = 12, COLUMN_VECTORS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, QUERY_TILE = 2, TOKEN_TILE = 6, COLUMN_VECTORS = 2 };
#else
enum { LANES = 4, QUERY_TILE = 2, TOKEN_TILE = 6, COLUMN_VECTORS = 2 };
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef float vfloat_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float vfloat4 __attribute__((vector_size(16)));
typedef int32_t vint4 __attribute__((vector_size(16)));
typedef float vfloat4_unaligned __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define UNROLL _Pragma("GCC unroll 16")
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (vint4){i, j, k, l})
#endif

INLINE vfloat load(const float* p) { return *(const vfloat_unaligned*)p; }
INLINE void store(float* p, vfloat v) { *(vfloat_unaligned*)p = v; }
INLINE vfloat splat(float x) { return x - (vfloat){0}; }
INLINE vfloat select_lanes(vint mask, vfloat a, vfloat b) { return (vfloat)((mask & (vint)a) | (~mask & (vint)b)); }

// The larger of both; b where either is not a number.
INLINE vfloat larger(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select_lanes(a > b, a, b);
#endif
}

INLINE float horizontal_max(vfloat v) {
  float result = v[0];
  UNROLL for (int i = 1; i < LANES; i++) result = v[i] > result ? v[i] : result;
  return result;
}

INLINE vfloat4 fold_to_4(vfloat v) {
  union { vfloat whole; vfloat4 quarter[LANES / 4]; } u = {v};
  vfloat4 sum = u.quarter[0];
  UNROLL for (int i = 1; i < LANES / 4; i++) sum += u.quarter[i];
  return sum;
}

// The sums of four vectors, as one vector of 4.
INLINE vfloat4 sum_each(vfloat v0, vfloat v1, vfloat v2, vfloat v3) {
  vfloat4 a = fold_to_4(v0), b = fold_to_4(v1), c = fold_to_4(v2), d = fold_to_4(v3);
  vfloat4 ab = SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7);
  vfloat4 cd = SHUFFLE(c, d, 0, 4, 2, 6) + SHUFFLE(c, d, 1, 5, 3, 7);
  return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

INLINE float horizontal_sum(vfloat v) {
  vfloat4 sum = fold_to_4(v);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// 2^x for x <= 0, relative error below 1e-7 (degree-6 minimax polynomial on [-0.5, 0.5], its own error 2e-9);
// exactly 0 below -126 and for -infinity; not a number stays not a number.
INLINE vfloat exp2_nonpositive(vfloat x) {
  const float round_magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  vint keep = ~(x < -126.0f);
  x = larger(splat(-126.0f), x);
  vfloat shifted = x + round_magic;
  vfloat f = x - (shifted - round_magic);
  vfloat p = f * 1.535336144e-04f + 1.339887457e-03f;
  p = p * f + 9.618437361e-03f;
  p = p * f + 5.550332471e-02f;
  p = p * f + 2.402264791e-01f;
  p = p * f + 6.931472029e-01f;
  p = p * f + 1.0f;
  return (vfloat)(((vint)p + ((vint)shifted << 23)) & keep);
}

// ---------------------------------------------------------------------------------------------------------------------
// Pages' formats. A quantized head is a scale for each block of its values, the upper half of a float32 (bfloat16), then
// a byte for each value: divided by its block's scale, rounded.

typedef enum { FLOAT32 = 0, INT8 = 1, FP8 = 2 } Format;
enum { SCALE_BLOCK = 32 };

INLINE size_t scale_bytes(size_t dim) { return (dim + SCALE_BLOCK - 1) / SCALE_BLOCK * sizeof(uint16_t); }
INLINE size_t head_size(Format format, size_t dim) { return format == FLOAT32 ? dim * sizeof(float) : scale_bytes(dim) + dim; }

// Of the block of value `d`.
INLINE float block_scale(const char* head, size_t d) {
  uint16_t half;
  memcpy(&half, head + d / SCALE_BLOCK * sizeof half, sizeof half);
  union { uint32_t bits; float value; } u = {(uint32_t)half << 16};
  return u.value;
}

// LANES bytes, each in the low bits of an integer, with its sign or without.
INLINE vint widen(const char* p, bool is_signed) {
#if defined(__AVX512F__)
  __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return (vint)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return (vint)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  vint result;
  UNROLL for (int i = 0; i < LANES; i++) result[i] = is_signed ? (int8_t)p[i] : (uint8_t)p[i];
  return result;
#endif
}

INLINE vfloat to_float(vint v) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX__)
  return (vfloat)_mm256_cvtepi32_ps((__m256i)v);
#else
  vfloat result;
  UNROLL for (int i = 0; i < LANES; i++) result[i] = (float)v[i];
  return result;
#endif
}

// E4M3's exponent and mantissa, moved to where float32 has its own, are the value times 2^-120, its small ones too.
INLINE vfloat from_fp8(vint bytes) { return (vfloat)((bytes & 0x7f) << 20 | (bytes & 0x80) << 24) * 0x1p120f; }

// LANES values of a head of `dim` from `d`, a multiple of LANES, on.
INLINE vfloat load_values(Format format, const char* head, size_t dim, size_t d) {
  if (format == FLOAT32) return load((const float*)head + d);
  vint bytes = widen(head + scale_bytes(dim) + d, format == INT8);
  return (format == INT8 ? to_float(bytes) : from_fp8(bytes)) * block_scale(head, d);
}

INLINE float load_value(Format format, const char* head, size_t dim, size_t d) {
  if (format == FLOAT32) return ((const float*)head)[d];
  char byte = head[scale_bytes(dim) + d];
  if (format == INT8) return (float)(int8_t)byte * block_scale(head, d);
  union { uint32_t bits; float value; } u = {(uint32_t)(byte & 0x7f) << 20 | (uint32_t)(byte & 0x80) << 24};
  return u.value * 0x1p120f * block_scale(head, d);
}

// out[i] = value first + i of a head of `dim`, for `count` of them.
INLINE void widen_head(Format format, const char* head, size_t dim, size_t first, size_t count, float* out) {
  size_t i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, load_values(format, head, dim, first + i));
  for (; i < count; i++) out[i] = load_value(format, head, dim, first + i);
}

// The largest magnitude; not a number, or infinite, where one of the values is.
INLINE float largest_magnitude(const float* x, size_t count) {
  uint32_t largest = 0;  // without their signs, floats are ordered as integers are, infinity and then what is no number last
  for (size_t d = 0; d < count; d++) {
    uint32_t bits;
    memcpy(&bits, x + d, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float result;
  memcpy(&result, &largest, sizeof result);
  return result;
}

// Rounds to nearest, ties to even. A block that is not finite gets a scale that is not, so that its row shows it.
INLINE void quantize_block(Format format, const float* x, size_t count, char* stored_scale, char* out) {
  const float top = format == INT8 ? 127.0f : 448.0f;
  union { float value; uint32_t bits; } scale = {largest_magnitude(x, count) / top};
  // Up to the next that bfloat16 has, so that nothing is over `top`. What is no number stays none, infinity infinity.
  if (scale.value < INFINITY) scale.bits = (scale.bits + 0xffff) & 0xffff0000;
  uint16_t half = (uint16_t)(scale.bits >> 16);
  memcpy(stored_scale, &half, sizeof half);
  float inverse = scale.value > 0x1p-126f && scale.value < INFINITY ? 1.0f / scale.value : 0.0f;
  for (size_t d = 0; d < count; d++) {
    float y = x[d] * inverse;
    y = y > -top ? (y < top ? y : top) : -top;  // -top for what is no number
    if (format == INT8) {
      y += 12582912.0f;  // 1.5 * 2^23: the nearest integer is left in the low bits
      memcpy(out + d, &y, 1);
    } else {
      uint32_t bits;
      y *= 0x1p-120f;
      memcpy(&bits, &y, sizeof bits);
      uint32_t magnitude = bits & 0x7fffffff;
      magnitude = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
      out[d] = (char)(magnitude | (bits >> 24 & 0x80));
    }
  }
}

INLINE void quantize_head(Format format, const float* x, size_t dim, char* head) {
  char* out = head + scale_bytes(dim);
  size_t d = 0;
  for (; d + SCALE_BLOCK <= dim; d += SCALE_BLOCK, head += sizeof(uint16_t))
    quantize_block(format, x + d, SCALE_BLOCK, head, out + d);
  if (d < dim) quantize_block(format, x + d, dim - d, head, out + d);
}

// Tokens x heads of `dim` values, one after another.
static void quantize(Format format, const float* x, size_t num_heads, size_t dim, char* out) {
  for (size_t i = 0; i < num_heads; i++, x += dim, out += head_size(format, dim)) {
    if (format == INT8)
      quantize_head(INT8, x, dim, out);
    else
      quantize_head(FP8, x, dim, out);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Buffers, kept between calls and shared by every session: a call takes as many as it has threads.

enum { POOL_SLOTS = 128, BUFFER_HEADER = 64 };
static _Atomic(void*) buffer_pool[POOL_SLOTS];

// At least `size` bytes, aligned to 64; null without memory. Contents are undefined.
static void* take_buffer(size_t size) {
  for (int i = 0; i < POOL_SLOTS; i++) {
    if (!atomic_load_explicit(&buffer_pool[i], memory_order_relaxed)) continue;
    char* block = atomic_exchange(&buffer_pool[i], NULL);
    if (!block) continue;
    if (*(size_t*)block >= size) return block + BUFFER_HEADER;
    free(block);
  }
  size_t rounded = (size + 65535) / 65536 * 65536;
  char* block = aligned_alloc(64, rounded + BUFFER_HEADER);
  if (!block) return NULL;
  *(size_t*)block = rounded;
  return block + BUFFER_HEADER;
}

static void give_buffer(void* buffer) {
  if (!buffer) return;
  void* block = (char*)buffer - BUFFER_HEADER;
  for (int i = 0; i < POOL_SLOTS; i++) {
    void* empty = NULL;
    if (atomic_compare_exchange_strong(&buffer_pool[i], &empty, block)) return;
  }
  free(block);
}

__attribute__((destructor)) static void free_buffers(void) {
  for (int i = 0; i < POOL_SLOTS; i++) free(atomic_exchange(&buffer_pool[i], NULL));
}

// ---------------------------------------------------------------------------------------------------------------------
// A call and its items

enum {
  DECODE_SPLIT = 128,        // keys of one decode item
  DECODE_MAX_SPLITS = 32,    // a longer context gets longer items instead, since partial sums cost memory
  PREFILL_SPLIT = 512,       // the same for a row of several queries,
  PREFILL_MAX_SPLITS = 16,   // of which each block of queries has its share
  PREFILL_ROWS = 64,         // query rows (queries x heads of the group) of one prefill item
  DECODE_COLUMNS = 256,      // key columns of one decode item, so that 1 KB of each token is read in one piece
  DECODE_BLOCK = 32,         // keys between two updates of the running maximum, decode
  PREFILL_BLOCK = 96,        // the same, prefill; a multiple of TOKEN_TILE
};

typedef struct {
  const OrtApi* api;
  int64_t num_heads, num_kv_heads, window, format;
  float scale;
} Kernel;

typedef struct {
  int32_t row, first_query, num_queries;  // queries of the row, counted from its first new token
  int32_t first_kv_head, num_kv_heads;
  int32_t first_key, end_key;             // positions in the sequence
  int32_t split, num_splits;
  int32_t group;                          // items of one group differ only in their keys
  size_t partial;                         // offset of the group's partial sums, in floats
} Item;

typedef struct {
  const Kernel* kernel;
  const float* query;
  const char *key, *value, *key_pages, *value_pages;  // all in the pages' format
  const int32_t *row_starts, *past_lengths, *page_table;
  float* output;
  size_t table_width, page_size, dim, padded_dim;
  size_t heads_per_kv;   // query heads of one key head
  size_t head_bytes, token_bytes;  // from one key head, or token, to the next
  size_t kv_heads_per_item, queries_per_item;
  float query_scale;     // scale * log2(e)
  size_t scratch_size;
  Item* items;
  size_t num_items;
  float* partials;       // of a group: per split a maximum and a sum for each row, then per split the rows
  atomic_int* arrived;   // splits of a group that are done
  atomic_size_t next_item;
  atomic_bool out_of_memory;
} Call;

INLINE size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
INLINE float* take_floats(float** cursor, size_t count) {
  float* result = *cursor;
  *cursor += round_up(count, 16);
  return result;
}

// Where the tokens at positions [first, first + count) of a row lie: the row's pages, then its own new tokens.
// The remaining pointers up to `capacity` repeat the last one, so that tiles never read what is not there.
static void find_tokens(const Call* call, int32_t row, size_t first, size_t count, size_t capacity, const char** keys,
                        const char** values) {
  size_t past = (size_t)call->past_lengths[row];
  const int32_t* table = call->page_table + (size_t)row * call->table_width;
  size_t i = 0;
  while (i < count && first + i < past) {
    size_t slot = (first + i) % call->page_size;
    size_t run = smaller(call->page_size - slot, smaller(count - i, past - first - i));
    size_t offset = ((size_t)table[(first + i) / call->page_size] * call->page_size + slot) * call->token_bytes;
    for (size_t j = 0; j < run; j++, i++, offset += call->token_bytes) {
      keys[i] = call->key_pages + offset;
      values[i] = call->value_pages + offset;
    }
  }
  for (; i < count; i++) {
    size_t offset = ((size_t)call->row_starts[row] + first + i - past) * call->token_bytes;
    keys[i] = call->key + offset;
    values[i] = call->value + offset;
  }
  for (; i < capacity; i++) {
    keys[i] = keys[count - 1];
    values[i] = values[count - 1];
  }
}

// Row r of an item is query (r / heads_per_kv) % num_queries, head r % heads_per_kv of key head r / (both).
static float* output_row(const Call* call, const Item* item, size_t r) {
  size_t head = r % call->heads_per_kv, rest = r / call->heads_per_kv;
  size_t query = rest % (size_t)item->num_queries, kv_head = rest / (size_t)item->num_queries;
  size_t token = (size_t)call->row_starts[item->row] + (size_t)item->first_query + query;
  head += ((size_t)item->first_kv_head + kv_head) * call->heads_per_kv;
  return call->output + (token * (size_t)call->kernel->num_heads + head) * call->dim;
}

// Writes an item's rows to the output, or adds up its group when it is the last of several to finish.
// sums: [rows, padded_dim], not yet divided by `total`; maxima and totals: [rows].
static void finish_item(Call* call, const Item* item, const float* sums, const float* maxima, const float* totals) {
  size_t rows = (size_t)(item->num_kv_heads * item->num_queries) * call->heads_per_kv;
  size_t splits = (size_t)item->num_splits, dim = call->dim, stride = call->padded_dim;
  if (splits == 1) {
    for (size_t r = 0; r < rows; r++) {
      float* out = output_row(call, item, r);
      const float* sum = sums + r * stride;
      float inverse = 1.0f / totals[r];
      for (size_t d = 0; d < dim; d++) out[d] = sum[d] * inverse;
    }
    return;
  }
  float* all_maxima = call->partials + item->partial;
  float* all_totals = all_maxima + splits * rows;
  float* all_sums = all_totals + splits * rows;
  memcpy(all_maxima + (size_t)item->split * rows, maxima, rows * sizeof(float));
  memcpy(all_totals + (size_t)item->split * rows, totals, rows * sizeof(float));
  for (size_t r = 0; r < rows; r++)
    memcpy(all_sums + ((size_t)item->split * rows + r) * dim, sums + r * stride, dim * sizeof(float));
  if (atomic_fetch_add_explicit(&call->arrived[item->group], 1, memory_order_acq_rel) != item->num_splits - 1) return;
  for (size_t r = 0; r < rows; r++) {
    float maximum = -INFINITY, total = 0.0f;
    for (size_t s = 0; s < splits; s++) maximum = fmaxf(maximum, all_maxima[s * rows + r]);
    float* out = output_row(call, item, r);
    memset(out, 0, dim * sizeof(float));
    for (size_t s = 0; s < splits; s++) {
      float weight = all_totals[s * rows + r] == 0.0f ? 0.0f : exp2f(all_maxima[s * rows + r] - maximum);
      const float* sum = all_sums + (s * rows + r) * dim;
      total += weight * all_totals[s * rows + r];
      if (weight != 0.0f)
        for (size_t d = 0; d < dim; d++) out[d] += weight * sum[d];
    }
    float inverse = 1.0f / total;
    for (size_t d = 0; d < dim; d++) out[d] *= inverse;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Decode: one query token, its heads of one key head at a time; vectors run along the head's dimension.

// scores[h][t] for `heads` query heads and 4 tokens.
INLINE void score_tile(Format format, int heads, const float* query, size_t query_stride, const char* const* keys,
                       size_t offset, size_t dim, float* scores) {
  const char *k0 = keys[0] + offset, *k1 = keys[1] + offset, *k2 = keys[2] + offset, *k3 = keys[3] + offset;
  vfloat sums[4][4];
  UNROLL for (int h = 0; h < heads; h++) sums[h][0] = sums[h][1] = sums[h][2] = sums[h][3] = (vfloat){0};
  size_t d = 0;
  for (; d + LANES <= dim; d += LANES) {
    vfloat key0 = load_values(format, k0, dim, d), key1 = load_values(format, k1, dim, d);
    vfloat key2 = load_values(format, k2, dim, d), key3 = load_values(format, k3, dim, d);
    UNROLL for (int h = 0; h < heads; h++) {
      vfloat q = load(query + (size_t)h * query_stride + d);
      sums[h][0] += q * key0;
      sums[h][1] += q * key1;
      sums[h][2] += q * key2;
      sums[h][3] += q * key3;
    }
  }
  UNROLL for (int h = 0; h < heads; h++) {
    vfloat4 result = sum_each(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
    const float* q = query + (size_t)h * query_stride;
    for (size_t e = d; e < dim; e++)
      result += q[e] * (vfloat4){load_value(format, k0, dim, e), load_value(format, k1, dim, e), load_value(format, k2, dim, e),
                                 load_value(format, k3, dim, e)};
    *(vfloat4_unaligned*)(scores + h * DECODE_BLOCK) = result;
  }
}

// sums[h][columns] = sums[h][columns] * rescale[h] + probabilities[h] @ values[columns] for `vectors` columns of LANES.
INLINE void value_tile(Format format, int heads, int vectors, const float* probabilities, const float* rescale,
                       const char* const* values, size_t offset, size_t dim, size_t d, size_t count, float* sums,
                       size_t stride) {
  vfloat acc[4][4];
  UNROLL for (int h = 0; h < heads; h++)
    UNROLL for (int v = 0; v < vectors; v++) acc[h][v] = load(sums + (size_t)h * stride + v * LANES) * rescale[h];
  for (size_t t = 0; t < count; t++) {
    const char* head = values[t] + offset;
    vfloat value[4];
    UNROLL for (int v = 0; v < vectors; v++) value[v] = load_values(format, head, dim, d + (size_t)(v * LANES));
    UNROLL for (int h = 0; h < heads; h++)
      UNROLL for (int v = 0; v < vectors; v++) acc[h][v] += value[v] * probabilities[h * DECODE_BLOCK + t];
  }
  UNROLL for (int h = 0; h < heads; h++)
    UNROLL for (int v = 0; v < vectors; v++) store(sums + (size_t)h * stride + v * LANES, acc[h][v]);
}

typedef struct {
  const char *keys[DECODE_BLOCK], *values[DECODE_BLOCK];
  size_t count;
} Block;

static void find_block(const Call* call, const Item* item, size_t first, Block* block) {
  size_t end = (size_t)item->end_key;
  block->count = first < end ? smaller(DECODE_BLOCK, end - first) : 0;
  if (block->count) find_tokens(call, item->row, first, block->count, DECODE_BLOCK, block->keys, block->values);
}

// While keys are worked on, this block's values and the next one's keys come from memory: tokens lie too far apart for
// the CPU to foresee where the next one is.
INLINE void fetch_ahead(const Block* block, const Block* next, size_t t, size_t offset, size_t head_bytes) {
  for (size_t i = 0; i < head_bytes; i += 64) {
    __builtin_prefetch(block->values[t] + offset + i);
    if (next->count) __builtin_prefetch(next->keys[t] + offset + i);
  }
}

INLINE void decode_scores(Format format, int heads, const float* query, size_t stride, const Block* block, const Block* next,
                          size_t offset, size_t head_bytes, size_t dim, float* scores) {
  for (size_t t = 0; t < block->count; t += 4) {
    if (next)
      for (size_t u = t; u < t + 4; u++) fetch_ahead(block, next, u, offset, head_bytes);
    score_tile(format, heads, query, stride, block->keys + t, offset, dim, scores + t);
  }
}

INLINE void decode_values(Format format, int heads, const float* probabilities, const float* rescale,
                          const char* const* values, size_t offset, size_t dim, size_t count, float* sums, size_t stride) {
  size_t d = 0;
  for (; d + COLUMN_VECTORS * LANES <= dim; d += COLUMN_VECTORS * LANES)
    value_tile(format, heads, COLUMN_VECTORS, probabilities, rescale, values, offset, dim, d, count, sums + d, stride);
  for (; d + LANES <= dim; d += LANES)
    value_tile(format, heads, 1, probabilities, rescale, values, offset, dim, d, count, sums + d, stride);
  for (; d < dim; d++)
    for (int h = 0; h < heads; h++) {
      float sum = sums[(size_t)h * stride + d] * rescale[h];
      for (size_t t = 0; t < count; t++)
        sum += probabilities[h * DECODE_BLOCK + t] * load_value(format, values[t] + offset, dim, d);
      sums[(size_t)h * stride + d] = sum;
    }
}

// Scores of a block become probabilities relative to the new maximum; returns the factor for what was summed before.
INLINE float update_softmax(float* scores, size_t count, float* maximum, float* total) {
  for (size_t t = count; t < round_up(count, LANES); t++) scores[t] = -INFINITY;
  vfloat block_maximum = splat(*maximum);
  for (size_t t = 0; t < count; t += LANES) block_maximum = larger(block_maximum, load(scores + t));
  float new_maximum = horizontal_max(block_maximum);
  vfloat sum = {0};
  for (size_t t = 0; t < count; t += LANES) {
    vfloat p = exp2_nonpositive(load(scores + t) - new_maximum);
    sum += p;
    store(scores + t, p);
  }
  float rescale = exp2_nonpositive(splat(*maximum - new_maximum))[0];
  *total = *total * rescale + horizontal_sum(sum);
  *maximum = new_maximum;
  return rescale;
}

INLINE void decode_format(Format format, Call* call, const Item* item, float* scratch) {
  size_t group = call->heads_per_kv, dim = call->dim, stride = call->padded_dim;
  size_t rows = group * (size_t)item->num_kv_heads;
  float* query = take_floats(&scratch, rows * stride);
  float* sums = take_floats(&scratch, rows * stride);
  float* maxima = take_floats(&scratch, rows);
  float* totals = take_floats(&scratch, rows);
  float* rescale = take_floats(&scratch, group);
  float* scores = take_floats(&scratch, group * DECODE_BLOCK);
  Block blocks[2], *block = &blocks[0], *next = &blocks[1];

  size_t first_head = (size_t)item->first_kv_head * group;
  const float* source = call->query + ((size_t)call->row_starts[item->row] * (size_t)call->kernel->num_heads + first_head) * dim;
  for (size_t r = 0; r < rows; r++) {
    for (size_t d = 0; d < dim; d++) query[r * stride + d] = source[r * dim + d] * call->query_scale;
    memset(sums + r * stride, 0, stride * sizeof(float));
    maxima[r] = -INFINITY;
    totals[r] = 0.0f;
  }

  size_t first = (size_t)item->first_key;
  for (find_block(call, item, first, block); block->count; first += DECODE_BLOCK) {
    size_t count = block->count;
    find_block(call, item, first + DECODE_BLOCK, next);
    for (size_t kv = 0; kv < (size_t)item->num_kv_heads; kv++) {
      size_t head_bytes = call->head_bytes, offset = ((size_t)item->first_kv_head + kv) * head_bytes, h = 0;
      const float* q = query + kv * group * stride;
      float* s = sums + kv * group * stride;
      for (; h + QUERY_TILE <= group; h += QUERY_TILE)
        decode_scores(format, QUERY_TILE, q + h * stride, stride, block, h ? NULL : next, offset, head_bytes, dim,
                      scores + h * DECODE_BLOCK);
      for (; h < group; h++)
        decode_scores(format, 1, q + h * stride, stride, block, h ? NULL : next, offset, head_bytes, dim,
                      scores + h * DECODE_BLOCK);
      for (h = 0; h < group; h++)
        rescale[h] = update_softmax(scores + h * DECODE_BLOCK, count, &maxima[kv * group + h], &totals[kv * group + h]);
      for (h = 0; h + QUERY_TILE <= group; h += QUERY_TILE)
        decode_values(format, QUERY_TILE, scores + h * DECODE_BLOCK, rescale + h, block->values, offset, dim, count,
                      s + h * stride, stride);
      for (; h < group; h++)
        decode_values(format, 1, scores + h * DECODE_BLOCK, rescale + h, block->values, offset, dim, count, s + h * stride,
                      stride);
    }
    Block* done = block;
    block = next;
    next = done;
  }
  finish_item(call, item, sums, maxima, totals);
}

static void decode(Call* call, const Item* item, float* scratch) {
  switch (call->kernel->format) {
    case INT8: decode_format(INT8, call, item, scratch); break;
    case FP8: decode_format(FP8, call, item, scratch); break;
    default: decode_format(FLOAT32, call, item, scratch);
  }
}

static size_t decode_scratch(const Call* call) {
  size_t group = call->heads_per_kv, rows = group * call->kv_heads_per_item;
  return 2 * rows * call->padded_dim + 2 * rows + group + group * DECODE_BLOCK + 6 * 16;
}

// ---------------------------------------------------------------------------------------------------------------------
// Prefill: a block of query rows of one key head against blocks of keys.
//
// Scores are computed transposed, [token][query row]: vectors run along the query rows, so that keys are read in place
// as scalars (quantized ones are widened first, a block at a time), queries are packed once, and the softmax has no horizontal step. Values are packed block by block into
// strips of STRIP columns, since token strides of a power of two would map them all to a few sets of the cache.

enum { PAIR = 2 * LANES, STRIP = COLUMN_VECTORS * LANES, OUTPUT_TILE = 4 };

// scores[t][lane] for TOKEN_TILE tokens and `vectors` vectors of query rows. packed: [dim][PAIR].
INLINE void score_block_tile(int vectors, const float* packed, const char* const* keys, size_t offset, size_t dim,
                             float* scores, size_t stride) {
  vfloat acc[TOKEN_TILE][2];
  const float* k[TOKEN_TILE];
  UNROLL for (int t = 0; t < TOKEN_TILE; t++) {
    k[t] = (const float*)(keys[t] + offset);
    UNROLL for (int v = 0; v < vectors; v++) acc[t][v] = (vfloat){0};
  }
  for (size_t d = 0; d < dim; d++) {
    vfloat q[2];
    UNROLL for (int v = 0; v < vectors; v++) q[v] = load(packed + d * PAIR + v * LANES);
    UNROLL for (int t = 0; t < TOKEN_TILE; t++) {
      float key = k[t][d];
      UNROLL for (int v = 0; v < vectors; v++) acc[t][v] += q[v] * key;
    }
  }
  UNROLL for (int t = 0; t < TOKEN_TILE; t++)
    UNROLL for (int v = 0; v < vectors; v++) store(scores + (size_t)t * stride + v * LANES, acc[t][v]);
}

static void widen_values(Format format, const char* head, size_t dim, size_t first, size_t count, float* out) {
  switch (format) {
    case INT8: widen_head(INT8, head, dim, first, count, out); break;
    case FP8: widen_head(FP8, head, dim, first, count, out); break;
    default: memcpy(out, head + first * sizeof(float), count * sizeof(float));
  }
}

// strips: [strip][token][STRIP], the last strip filled up with zeros.
static void pack_values(Format format, const char* const* values, size_t offset, size_t dim, size_t count, float* strips) {
  for (size_t first = 0; first < dim; first += STRIP) {
    size_t width = smaller(STRIP, dim - first);
    float* strip = strips + first * PREFILL_BLOCK;
    for (size_t t = 0; t < count; t++) {
      widen_values(format, values[t] + offset, dim, first, width, strip + t * STRIP);
      if (width < STRIP) memset(strip + t * STRIP + width, 0, (STRIP - width) * sizeof(float));
    }
  }
}

// sums[r][columns] = sums[r][columns] * rescale[r] + probabilities[:, r] @ strip for OUTPUT_TILE rows.
INLINE void output_tile(int vectors, const float* probabilities, size_t stride, const float* rescale, const float* strip,
                        size_t count, float* sums, size_t sums_stride) {
  vfloat acc[OUTPUT_TILE][4];
  UNROLL for (int r = 0; r < OUTPUT_TILE; r++)
    UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = load(sums + (size_t)r * sums_stride + v * LANES) * rescale[r];
  for (size_t t = 0; t < count; t++) {
    vfloat value[4];
    UNROLL for (int v = 0; v < vectors; v++) value[v] = load(strip + t * STRIP + v * LANES);
    UNROLL for (int r = 0; r < OUTPUT_TILE; r++) {
      float p = probabilities[t * stride + (size_t)r];
      UNROLL for (int v = 0; v < vectors; v++) acc[r][v] += value[v] * p;
    }
  }
  UNROLL for (int r = 0; r < OUTPUT_TILE; r++)
    UNROLL for (int v = 0; v < vectors; v++) store(sums + (size_t)r * sums_stride + v * LANES, acc[r][v]);
}

// Hides keys that a query row may not see. positions: int32 [rows], of the queries; window 0: none.
static void mask_scores(float* scores, size_t stride, size_t rows, size_t count, const int32_t* positions, int32_t first_key,
                        int32_t window) {
  for (size_t t = 0; t < count; t++) {
    int32_t key = first_key + (int32_t)t;
    float* row = scores + t * stride;
    for (size_t r = 0; r < rows; r++) {
      bool seen = key <= positions[r] && (window == 0 || key > positions[r] - window);
      row[r] = seen ? row[r] : -INFINITY;
    }
  }
}

// Scores [count][stride] of LANES query rows become probabilities; as update_softmax, for a vector of rows.
INLINE void update_softmax_lanes(float* scores, size_t stride, size_t count, float* maxima, float* totals, float* rescale) {
  vfloat old = load(maxima), even = old, odd = old;
  size_t t = 0;
  for (; t + 2 <= count; t += 2) {
    even = larger(even, load(scores + t * stride));
    odd = larger(odd, load(scores + (t + 1) * stride));
  }
  if (t < count) even = larger(even, load(scores + t * stride));
  vfloat maximum = larger(even, odd);
  // A row whose every key so far is hidden keeps -infinity; 0 in its place gives probabilities 0 rather than inf - inf.
  vfloat finite = select_lanes(maximum == -INFINITY, (vfloat){0}, maximum);
  vfloat sum = {0};
  for (t = 0; t < count; t++) {
    vfloat p = exp2_nonpositive(load(scores + t * stride) - finite);
    sum += p;
    store(scores + t * stride, p);
  }
  vfloat factor = exp2_nonpositive(old - finite);
  store(totals, load(totals) * factor + sum);
  store(maxima, maximum);
  store(rescale, factor);
}

static void prefill(Call* call, const Item* item, float* scratch) {
  size_t group = call->heads_per_kv, dim = call->dim, stride = call->padded_dim;
  size_t rows = group * (size_t)item->num_queries, width = round_up(rows, LANES);
  size_t num_heads = (size_t)call->kernel->num_heads, offset = (size_t)item->first_kv_head * call->head_bytes;
  Format format = (Format)call->kernel->format;
  float* packed = take_floats(&scratch, round_up(rows, PAIR) * dim);
  float* scores = take_floats(&scratch, PREFILL_BLOCK * width);
  float* sums = take_floats(&scratch, width * stride);
  float* strips = take_floats(&scratch, stride * PREFILL_BLOCK);
  float* maxima = take_floats(&scratch, width);
  float* totals = take_floats(&scratch, width);
  float* rescale = take_floats(&scratch, width);
  int32_t* positions = (int32_t*)take_floats(&scratch, width);
  float* widened = take_floats(&scratch, format == FLOAT32 ? 0 : PREFILL_BLOCK * dim);
  const char *keys[PREFILL_BLOCK], *values[PREFILL_BLOCK];
  int32_t first_position = call->past_lengths[item->row] + item->first_query;
  int32_t last_position = first_position + item->num_queries - 1, window = (int32_t)call->kernel->window;

  memset(packed, 0, round_up(rows, PAIR) * dim * sizeof(float));
  for (size_t r = 0; r < rows; r++) {
    size_t token = (size_t)call->row_starts[item->row] + (size_t)item->first_query + r / group;
    const float* source = call->query + (token * num_heads + (size_t)item->first_kv_head * group + r % group) * dim;
    float* target = packed + r / PAIR * PAIR * dim + r % PAIR;
    for (size_t d = 0; d < dim; d++) target[d * PAIR] = source[d] * call->query_scale;
  }
  memset(sums, 0, width * stride * sizeof(float));
  for (size_t r = 0; r < width; r++) {
    positions[r] = first_position + (int32_t)(smaller(r, rows - 1) / group);
    maxima[r] = -INFINITY;
    totals[r] = 0.0f;
  }

  for (int32_t first = item->first_key; first < item->end_key; first += PREFILL_BLOCK) {
    size_t count = smaller(PREFILL_BLOCK, (size_t)(item->end_key - first));
    find_tokens(call, item->row, (size_t)first, count, PREFILL_BLOCK, keys, values);
    size_t key_offset = offset;
    if (format != FLOAT32) {
      key_offset = 0;
      for (size_t t = 0; t < PREFILL_BLOCK; t++) {
        if (t < count) widen_values(format, keys[t] + offset, dim, 0, dim, widened + t * dim);
        keys[t] = (const char*)(widened + smaller(t, count - 1) * dim);
      }
    }
    for (size_t r = 0; r < rows; r += PAIR)
      for (size_t t = 0; t < count; t += TOKEN_TILE) {
        if (rows - r > LANES)
          score_block_tile(2, packed + r * dim, keys + t, key_offset, dim, scores + t * width + r, width);
        else
          score_block_tile(1, packed + r * dim, keys + t, key_offset, dim, scores + t * width + r, width);
      }
    bool beyond = first + (int32_t)count - 1 > first_position, too_old = window != 0 && first <= last_position - window;
    if (beyond || too_old) mask_scores(scores, width, width, count, positions, first, window);
    for (size_t r = 0; r < width; r += LANES)
      update_softmax_lanes(scores + r, width, count, maxima + r, totals + r, rescale + r);
    pack_values(format, values, offset, dim, count, strips);
    for (size_t d = 0; d < dim; d += STRIP) {
      const float* strip = strips + d * PREFILL_BLOCK;
      size_t left = dim - d;
      for (size_t r = 0; r < rows; r += OUTPUT_TILE) {
        float* target = sums + r * stride + d;
        if (left > (COLUMN_VECTORS - 1) * LANES)
          output_tile(COLUMN_VECTORS, scores + r, width, rescale + r, strip, count, target, stride);
        else
          for (size_t e = 0; e < left; e += LANES)
            output_tile(1, scores + r, width, rescale + r, strip + e, count, target + e, stride);
      }
    }
  }
  finish_item(call, item, sums, maxima, totals);
}

static size_t prefill_scratch(const Call* call) {
  size_t rows = round_up(call->heads_per_kv * call->queries_per_item, PAIR);
  size_t widened = call->kernel->format == FLOAT32 ? 0 : PREFILL_BLOCK * call->dim;
  return rows * call->dim + PREFILL_BLOCK * rows + rows * call->padded_dim + call->padded_dim * PREFILL_BLOCK + widened + 4 * rows +
         9 * 16;
}

// ---------------------------------------------------------------------------------------------------------------------
// Plan and run

static void work(void* data, size_t index) {
  (void)index;
  Call* call = data;
  if (atomic_load_explicit(&call->next_item, memory_order_relaxed) >= call->num_items) return;
  float* scratch = take_buffer(call->scratch_size * sizeof(float));
  if (!scratch) {
    atomic_store(&call->out_of_memory, true);
    return;
  }
  for (;;) {
    size_t i = atomic_fetch_add_explicit(&call->next_item, 1, memory_order_relaxed);
    if (i >= call->num_items) break;
    const Item* item = &call->items[i];
    bool single = call->row_starts[item->row + 1] - call->row_starts[item->row] == 1;
    (single ? decode : prefill)(call, item, scratch);
  }
  give_buffer(scratch);
}

// What has been planned so far.
typedef struct {
  Item* items;  // null: only count
  size_t num_items, partial_floats;
  int32_t num_groups;
} Plan;

// Keys of an item of a row with so many keys and query blocks; items start at multiples of it.
static int32_t split_size(bool single, int32_t num_keys, int32_t num_blocks) {
  int64_t unit = single ? DECODE_SPLIT : PREFILL_SPLIT, max_splits = single ? DECODE_MAX_SPLITS : PREFILL_MAX_SPLITS / num_blocks;
  if (max_splits <= 1) return INT32_MAX;
  int64_t units = (num_keys + unit * max_splits - 1) / (unit * max_splits);
  return (int32_t)(units * unit);
}

// Adds the items of a row, the longest first.
static void plan_row(const Call* call, int32_t row, Plan* plan) {
  int32_t num_queries = call->row_starts[row + 1] - call->row_starts[row], past = call->past_lengths[row];
  int32_t window = (int32_t)call->kernel->window, num_kv_heads = (int32_t)call->kernel->num_kv_heads;
  bool single = num_queries == 1;
  int32_t block = single ? 1 : (int32_t)call->queries_per_item, heads = single ? (int32_t)call->kv_heads_per_item : 1;
  int32_t last_block = num_queries > 0 ? (num_queries - 1) / block : -1;
  for (int32_t b = last_block; b >= 0; b--) {  // later queries see more keys
    int32_t first_query = b * block, queries = (int32_t)smaller((size_t)block, (size_t)(num_queries - first_query));
    int32_t oldest = past + first_query - window + 1, first_key = window && oldest > 0 ? oldest : 0;
    int32_t end_key = past + first_query + queries;
    int32_t split = split_size(single, end_key - first_key, last_block + 1);
    int32_t first_split = first_key / split, num_splits = (end_key - 1) / split - first_split + 1;
    for (int32_t kv = 0; kv < num_kv_heads; kv += heads) {
      int32_t num_heads = (int32_t)smaller((size_t)heads, (size_t)(num_kv_heads - kv));
      for (int32_t s = 0; s < num_splits; s++) {
        size_t i = plan->num_items++;
        if (!plan->items) continue;
        int64_t start = (int64_t)(first_split + s) * split, end = start + split;
        plan->items[i] = (Item){
            .row = row, .first_query = first_query, .num_queries = queries, .first_kv_head = kv, .num_kv_heads = num_heads,
            .first_key = start > first_key ? (int32_t)start : first_key, .end_key = end < end_key ? (int32_t)end : end_key,
            .split = s, .num_splits = num_splits, .group = plan->num_groups, .partial = plan->partial_floats,
        };
      }
      size_t rows = (size_t)(num_heads * queries) * call->heads_per_kv;
      if (num_splits > 1) plan->partial_floats += (size_t)num_splits * rows * (call->dim + 2);
      plan->num_groups++;
    }
  }
}

static OrtStatus* run(Call* call, int32_t num_rows, OrtKernelContext* context) {
  const OrtApi* api = call->kernel->api;
  Plan plan = {0};
  for (int32_t row = 0; row < num_rows; row++) plan_row(call, row, &plan);
  if (plan.num_items == 0) return NULL;
  size_t item_bytes = round_up(plan.num_items * sizeof(Item), 64);
  size_t group_bytes = round_up((size_t)plan.num_groups * sizeof(atomic_int), 64);
  char* buffer = take_buffer(item_bytes + group_bytes + plan.partial_floats * sizeof(float));
  if (!buffer) return make_status(api, ORT_FAIL, "PagedAttention: out of memory");
  call->items = (Item*)buffer;
  call->arrived = (atomic_int*)(buffer + item_bytes);
  call->partials = (float*)(buffer + item_bytes + group_bytes);
  for (int32_t g = 0; g < plan.num_groups; g++) atomic_init(&call->arrived[g], 0);
  plan = (Plan){.items = call->items};
  for (int32_t row = 0; row < num_rows; row++) plan_row(call, row, &plan);
  call->num_items = plan.num_items;
  atomic_init(&call->next_item, 0);
  atomic_init(&call->out_of_memory, false);

  size_t prefill_size = prefill_scratch(call), decode_size = decode_scratch(call);
  call->scratch_size = prefill_size > decode_size ? prefill_size : decode_size;
  OrtStatus* status = NULL;
  if (call->num_items == 1)
    work(call, 0);
  else
    status = CALL(api, API_CONTEXT_PARALLEL_FOR, OrtStatus*, const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t,
                  void*)(context, work, smaller(call->num_items, POOL_SLOTS), 0, call);
  // A thread without memory leaves its items to the others; only if all of them failed is something missing.
  if (!status && atomic_load(&call->out_of_memory) && atomic_load(&call->next_item) < call->num_items)
    status = make_status(api, ORT_FAIL, "PagedAttention: out of memory");
  give_buffer(buffer);
  return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// The operator

enum { QUERY, KEY, VALUE, KEY_PAGES, VALUE_PAGES, ROW_STARTS, PAST_LENGTHS, PAGE_TABLE, NUM_INPUTS };
static const char* const input_names[NUM_INPUTS] = {"query",       "key",        "value",        "key_pages",
                                                    "value_pages", "row_starts", "past_lengths", "page_table"};
static const size_t input_ranks[NUM_INPUTS] = {2, 2, 2, 4, 4, 1, 1, 2};

#define FAIL(...)                                             \
  do {                                                        \
    char message[256];                                        \
    snprintf(message, sizeof message, "PagedAttention: " __VA_ARGS__); \
    return make_status(api, ORT_INVALID_ARGUMENT, message);   \
  } while (0)

static OrtStatus* read_shape(const OrtApi* api, const OrtValue* value, int input, int64_t* dims) {
  OrtShape* shape = NULL;
  OrtStatus* status = CALL(api, API_GET_TENSOR_TYPE_AND_SHAPE, OrtStatus*, const OrtValue*, OrtShape**)(value, &shape);
  if (status) return status;
  size_t rank = 0;
  status = CALL(api, API_GET_DIMENSIONS_COUNT, OrtStatus*, const OrtShape*, size_t*)(shape, &rank);
  if (!status && rank == input_ranks[input])
    status = CALL(api, API_GET_DIMENSIONS, OrtStatus*, const OrtShape*, int64_t*, size_t)(shape, dims, rank);
  CALL(api, API_RELEASE_SHAPE, void, OrtShape*)(shape);
  if (status) return status;
  if (rank != input_ranks[input]) FAIL("%s has rank %zu, wanted %zu", input_names[input], rank, input_ranks[input]);
  return NULL;
}

static int64_t head_dim(const Kernel* kernel, int64_t dims[NUM_INPUTS][4]) {
  return kernel->format == FLOAT32 ? dims[KEY_PAGES][3] : dims[QUERY][1] / kernel->num_heads;
}

static OrtStatus* check_shapes(const OrtApi* api, const Kernel* kernel, int64_t dims[NUM_INPUTS][4]) {
  int64_t tokens = dims[QUERY][0], rows = dims[PAST_LENGTHS][0], dim = head_dim(kernel, dims);
  if (dims[KEY_PAGES][2] != kernel->num_kv_heads)
    FAIL("key_pages has %lld key heads, num_kv_heads is %lld", (long long)dims[KEY_PAGES][2], (long long)kernel->num_kv_heads);
  if (memcmp(dims[KEY_PAGES], dims[VALUE_PAGES], 4 * sizeof(int64_t)) != 0) FAIL("key_pages and value_pages differ in shape");
  if (dim < 1 || dim > 65536 || dims[KEY_PAGES][1] < 1) FAIL("pages have no slots or a head dimension of %lld", (long long)dim);
  int64_t columns = kernel->format == FLOAT32 ? dim : (int64_t)head_size((Format)kernel->format, (size_t)dim);
  if (dims[KEY_PAGES][3] != columns) FAIL("pages have %lld bytes a head, wanted %lld", (long long)dims[KEY_PAGES][3], (long long)columns);
  if (dims[QUERY][1] != kernel->num_heads * dim)
    FAIL("query has %lld columns, num_heads * head_dim is %lld * %lld", (long long)dims[QUERY][1],
         (long long)kernel->num_heads, (long long)dim);
  for (int i = KEY; i <= VALUE; i++) {
    if (dims[i][0] != tokens) FAIL("%s has %lld tokens, query has %lld", input_names[i], (long long)dims[i][0], (long long)tokens);
    if (dims[i][1] != kernel->num_kv_heads * dim)
      FAIL("%s has %lld columns, num_kv_heads * head_dim is %lld * %lld", input_names[i], (long long)dims[i][1],
           (long long)kernel->num_kv_heads, (long long)dim);
  }
  if (dims[ROW_STARTS][0] != rows + 1)
    FAIL("row_starts has %lld entries, wanted rows + 1 = %lld", (long long)dims[ROW_STARTS][0], (long long)rows + 1);
  if (dims[PAGE_TABLE][0] != rows) FAIL("page_table has %lld rows, past_lengths has %lld", (long long)dims[PAGE_TABLE][0], (long long)rows);
  if (tokens > INT32_MAX || rows > INT32_MAX - 1) FAIL("too many tokens");
  return NULL;
}

static OrtStatus* check_rows(const OrtApi* api, const Call* call, int32_t num_rows, int64_t num_tokens, int64_t num_pages) {
  int64_t page_size = (int64_t)call->page_size, window = call->kernel->window;
  if (call->row_starts[0] != 0 || call->row_starts[num_rows] != num_tokens)
    FAIL("row_starts runs from %d to %d, wanted 0 to %lld", call->row_starts[0], call->row_starts[num_rows], (long long)num_tokens);
  for (int32_t row = 0; row < num_rows; row++) {
    int64_t queries = (int64_t)call->row_starts[row + 1] - call->row_starts[row], past = call->past_lengths[row];
    if (queries < 0) FAIL("row_starts falls at row %d", row);
    if (past < 0 || past > (int64_t)call->table_width * page_size)
      FAIL("row %d has %lld past tokens, its table has room for %lld", row, (long long)past,
           (long long)call->table_width * page_size);
    if (past + queries > INT32_MAX - PREFILL_BLOCK) FAIL("row %d is too long", row);
    if (queries == 0) continue;
    int64_t first_key = window && past - window + 1 > 0 ? past - window + 1 : 0;
    const int32_t* table = call->page_table + (size_t)row * call->table_width;
    for (int64_t page = first_key / page_size; page * page_size < past; page++)
      if (table[page] < 0 || table[page] >= num_pages)
        FAIL("row %d names page %d at entry %lld, there are %lld pages", row, table[page], (long long)page, (long long)num_pages);
  }
  return NULL;
}

static OrtStatus* make_output(const OrtApi* api, OrtKernelContext* context, size_t index, const int64_t* dims, void** data) {
  OrtValue* value = NULL;
  OrtStatus* status = CALL(api, API_CONTEXT_GET_OUTPUT, OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t,
                           OrtValue**)(context, index, dims, 2, &value);
  return status ? status : CALL(api, API_GET_TENSOR_MUTABLE_DATA, OrtStatus*, OrtValue*, void**)(value, data);
}

static OrtStatus* compute(void* op_kernel, OrtKernelContext* context) {
  const Kernel* kernel = op_kernel;
  const OrtApi* api = kernel->api;
  const void* data[NUM_INPUTS];
  int64_t dims[NUM_INPUTS][4];
  OrtStatus* status;
  for (size_t i = 0; i < NUM_INPUTS; i++) {
    const OrtValue* value = NULL;
    status = CALL(api, API_CONTEXT_GET_INPUT, OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**)(context, i, &value);
    if (!status) status = read_shape(api, value, (int)i, dims[i]);
    if (!status) status = CALL(api, API_GET_TENSOR_MUTABLE_DATA, OrtStatus*, const OrtValue*, const void**)(value, &data[i]);
    if (status) return status;
  }
  status = check_shapes(api, kernel, dims);
  if (status) return status;

  Format format = (Format)kernel->format;
  size_t dim = (size_t)head_dim(kernel, dims), group = (size_t)(kernel->num_heads / kernel->num_kv_heads);
  size_t head_bytes = head_size(format, dim);
  size_t num_kv_heads = (size_t)kernel->num_kv_heads, num_tokens = (size_t)dims[QUERY][0];
  void *output, *kept[2] = {(void*)data[KEY], (void*)data[VALUE]};
  status = make_output(api, context, 0, dims[QUERY], &output);
  for (size_t i = 0; i < 2 && !status && format != FLOAT32; i++) {
    status = make_output(api, context, 1 + i, (int64_t[]){dims[QUERY][0], (int64_t)(num_kv_heads * head_bytes)}, &kept[i]);
    if (!status) quantize(format, data[KEY + i], num_tokens * num_kv_heads, dim, kept[i]);
  }
  if (status) return status;
  size_t kv_heads_per_item = dim < DECODE_COLUMNS ? DECODE_COLUMNS / dim : 1;
  Call call = {
      .kernel = kernel,
      .query = data[QUERY], .key = kept[0], .value = kept[1],
      .key_pages = data[KEY_PAGES], .value_pages = data[VALUE_PAGES],
      .row_starts = data[ROW_STARTS], .past_lengths = data[PAST_LENGTHS], .page_table = data[PAGE_TABLE],
      .output = output,
      .table_width = (size_t)dims[PAGE_TABLE][1], .page_size = (size_t)dims[KEY_PAGES][1],
      .dim = dim, .padded_dim = round_up(dim, STRIP), .heads_per_kv = group,
      .head_bytes = head_bytes, .token_bytes = num_kv_heads * head_bytes,
      .kv_heads_per_item = smaller(kv_heads_per_item, (size_t)kernel->num_kv_heads),
      .queries_per_item = group < PREFILL_ROWS ? PREFILL_ROWS / group : 1,
      .query_scale = kernel->scale * 1.44269504f,
  };
  int32_t num_rows = (int32_t)dims[PAST_LENGTHS][0];
  status = check_rows(api, &call, num_rows, dims[QUERY][0], dims[KEY_PAGES][0]);
  return status ? status : run(&call, num_rows, context);
}

static OrtStatus* create_kernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) {
  Kernel kernel = {.api = api};
  struct { const char* name; int64_t* value; } integers[] = {
      {"num_heads", &kernel.num_heads}, {"num_kv_heads", &kernel.num_kv_heads}, {"window", &kernel.window},
      {"format", &kernel.format}};
  bool is_quantized = op->GetOutputTypeCount(op) > 1;
  for (size_t i = 0; i < (is_quantized ? 4 : 3); i++) {
    OrtStatus* status = CALL(api, API_KERNEL_INFO_GET_INT64, OrtStatus*, const OrtKernelInfo*, const char*, int64_t*)(
        info, integers[i].name, integers[i].value);
    if (status) return status;
  }
  OrtStatus* status = CALL(api, API_KERNEL_INFO_GET_FLOAT, OrtStatus*, const OrtKernelInfo*, const char*, float*)(
      info, "scale", &kernel.scale);
  if (status) return status;
  if (kernel.num_kv_heads < 1 || kernel.num_heads < kernel.num_kv_heads || kernel.num_heads % kernel.num_kv_heads != 0 ||
      kernel.num_heads > 65536)
    FAIL("num_heads %lld is no multiple of num_kv_heads %lld", (long long)kernel.num_heads, (long long)kernel.num_kv_heads);
  if (is_quantized && kernel.format != INT8 && kernel.format != FP8) FAIL("format is %lld", (long long)kernel.format);
  if (kernel.window < 0 || kernel.window > INT32_MAX) FAIL("window is %lld", (long long)kernel.window);
  Kernel* result = malloc(sizeof *result);
  if (!result) return make_status(api, ORT_FAIL, "PagedAttention: out of memory");
  *result = kernel;
  *out = result;
  return NULL;
}

static void destroy_kernel(void* kernel) { free(kernel); }
static const char* get_name(const OrtCustomOp* op) { (void)op; return "PagedAttention"; }
static const char* get_provider(const OrtCustomOp* op) { (void)op; return "CPUExecutionProvider"; }
static const char* get_quantized_name(const OrtCustomOp* op) { (void)op; return "QuantizedPagedAttention"; }
static int get_input_type(const OrtCustomOp* op, size_t i) {
  if (i >= ROW_STARTS) return ORT_INT32;
  return i >= KEY_PAGES && op->GetOutputTypeCount(op) > 1 ? ORT_UINT8 : ORT_FLOAT;
}
static size_t get_input_count(const OrtCustomOp* op) { (void)op; return NUM_INPUTS; }
static int get_output_type(const OrtCustomOp* op, size_t i) { (void)op; return i ? ORT_UINT8 : ORT_FLOAT; }
static size_t get_output_count(const OrtCustomOp* op) { (void)op; return 1; }
static size_t get_quantized_output_count(const OrtCustomOp* op) { (void)op; return 3; }  // and the rounded keys and values
static int get_zero(const OrtCustomOp* op, size_t i) { (void)op; (void)i; return 0; }  // required; default memory
static int get_one(const OrtCustomOp* op) { (void)op; return 1; }

#define OPERATOR(name, num_outputs) { \
    .version = ORT_API_USED, \
    .GetName = name, \
    .GetExecutionProviderType = get_provider, \
    .GetInputType = get_input_type, \
    .GetInputTypeCount = get_input_count, \
    .GetOutputType = get_output_type, \
    .GetOutputTypeCount = num_outputs, \
    .KernelDestroy = destroy_kernel, \
    .GetInputCharacteristic = get_zero, \
    .GetOutputCharacteristic = get_zero, \
    .GetInputMemoryType = get_zero, \
    .GetVariadicInputMinArity = get_one, \
    .GetVariadicInputHomogeneity = get_one, \
    .GetVariadicOutputMinArity = get_one, \
    .GetVariadicOutputHomogeneity = get_one, \
    .CreateKernelV2 = create_kernel, \
    .KernelComputeV2 = compute, \
  }

static const OrtCustomOp operators[] = {
    OPERATOR(get_name, get_output_count),
    OPERATOR(get_quantized_name, get_quantized_output_count),
};

// ONNX Runtime calls this for each session that registers the library. The domain is shared by all of them, since it
// has to outlive every session that uses it.
__attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  static _Atomic(OrtCustomOpDomain*) shared_domain;
  const OrtApi* api = base->GetApi(ORT_API_USED);
  if (!api) {
    const OrtApi* oldest = base->GetApi(1);  // CreateStatus has been the first entry since version 1
    char message[160];
    snprintf(message, sizeof message, "llm_runtime::PagedAttention needs ONNX Runtime 1.17 or later, this is %s",
             base->GetVersionString());
    return oldest ? make_status(oldest, ORT_FAIL, message) : NULL;
  }
  OrtCustomOpDomain* domain = atomic_load(&shared_domain);
  if (!domain) {
    OrtStatus* status = CALL(api, API_CREATE_CUSTOM_OP_DOMAIN, OrtStatus*, const char*, OrtCustomOpDomain**)("llm_runtime", &domain);
    for (size_t i = 0; i < sizeof operators / sizeof *operators && !status; i++)
      status = CALL(api, API_CUSTOM_OP_DOMAIN_ADD, OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*)(domain, &operators[i]);
    if (status) return status;
    OrtCustomOpDomain* other = NULL;
    if (!atomic_compare_exchange_strong(&shared_domain, &other, domain)) domain = other;  // another session was first
  }
  return CALL(api, API_ADD_CUSTOM_OP_DOMAIN, OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*)(options, domain);
}
