// Matmul kernels for float32, for processors and shapes where torch's libraries are slower. Included after host.h.
//
// MKL is optimised for Intel's processors: on Zen 4 it takes 7 microseconds for 64 x 64 x 64, these kernels 5. A tile of
// the result, kTileRows by two vectors of columns, is accumulated in registers over a block of terms. The right side is
// read in place if its rows are contiguous, else from packed panels of a tile's columns. The terms of each element are
// added in the same order for any number of threads.

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace host {

#ifdef __AVX512F__
constexpr int kLanes = 16, kTileRows = 8;  // 16 of 32 registers hold sums
#else
constexpr int kLanes = 8, kTileRows = 6;  // 12 of 16 registers hold sums
#endif
constexpr int kTileColumns = 2 * kLanes;
// Terms of a block, whose panel fits the L1 cache; columns from which rows of the right side map to the same cache sets.
constexpr int64_t kTerms = 256, kWide = 512;
// Rows from which packing the right side pays, and multiplications from which a second thread pays.
constexpr int64_t kFewRows = 16, kShared = 1 << 20;

typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// Explicit intrinsics, since the compiler's options do not allow it to contract products and sums.
inline __attribute__((always_inline)) Lanes multiply_add(float one, Lanes other, Lanes sum) {
#if defined(__AVX512F__)
  return __builtin_ia32_vfmaddps512_mask(one - Lanes{}, other, sum, -1, 4);
#elif defined(__AVX2__) && defined(__FMA__)
  return __builtin_ia32_vfmaddps256(one - Lanes{}, other, sum);
#else
  return one * other + sum;
#endif
}

struct Matrix {
  float* data;
  int64_t rows, columns, row_step, column_step;
};

template <int ROWS>
inline __attribute__((always_inline)) void tile(
    const float* left, int64_t row_step, int64_t term_step, const float* right, int64_t right_step, float* out,
    int64_t out_step, int64_t terms, bool adds) {
  Lanes sums[ROWS][2];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++)
      sums[i][j] = adds ? *reinterpret_cast<const Lanes*>(out + i * out_step + j * kLanes) : Lanes{};
  for (int64_t k = 0; k < terms; k++) {
    Lanes row[2];
    for (int j = 0; j < 2; j++) row[j] = *reinterpret_cast<const Lanes*>(right + k * right_step + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < 2; j++) sums[i][j] = multiply_add(left[i * row_step + k * term_step], row[j], sums[i][j]);
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++) *reinterpret_cast<Lanes*>(out + i * out_step + j * kLanes) = sums[i][j];
}

// Add one block of terms to rows [first, last) of a tile's columns.
void add_block(
    const Matrix& left, int64_t term, int64_t terms, const float* right, int64_t right_step, float* out,
    int64_t out_step, int64_t first, int64_t last) {
  const float* from = left.data + term * left.column_step;
  int64_t row = left.row_step, i = first;
  for (; i + kTileRows <= last; i += kTileRows)
    tile<kTileRows>(
        from + i * row, row, left.column_step, right, right_step, out + i * out_step, out_step, terms, term > 0);
  if (i + 4 <= last) {
    tile<4>(from + i * row, row, left.column_step, right, right_step, out + i * out_step, out_step, terms, term > 0);
    i += 4;
  }
  if (i + 2 <= last) {
    tile<2>(from + i * row, row, left.column_step, right, right_step, out + i * out_step, out_step, terms, term > 0);
    i += 2;
  }
  if (i < last)
    tile<1>(from + i * row, row, left.column_step, right, right_step, out + i * out_step, out_step, terms, term > 0);
}

// Copy a block of terms of a tile's columns to a panel, with zeros for missing columns.
void pack(const Matrix& right, int64_t term, int64_t terms, int64_t column, int64_t columns, float* panel) {
  const float* from = right.data + term * right.row_step + column * right.column_step;
  if (columns < kTileColumns) std::memset(panel, 0, terms * kTileColumns * sizeof(float));
  if (right.column_step == 1) {
    for (int64_t k = 0; k < terms; k++)
      std::memcpy(panel + k * kTileColumns, from + k * right.row_step, columns * sizeof(float));
    return;
  }
  int64_t done = 0, whole = terms / 4 * 4;
#ifdef __SSE__
  for (; right.row_step == 1 && done + 4 <= columns; done += 4)
    for (int64_t k = 0; k < whole; k += 4) {
      const float* at = from + done * right.column_step + k;
      __m128 a = _mm_loadu_ps(at), b = _mm_loadu_ps(at + right.column_step);
      __m128 c = _mm_loadu_ps(at + 2 * right.column_step), d = _mm_loadu_ps(at + 3 * right.column_step);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      float* to = panel + k * kTileColumns + done;
      _mm_storeu_ps(to, a), _mm_storeu_ps(to + kTileColumns, b);
      _mm_storeu_ps(to + 2 * kTileColumns, c), _mm_storeu_ps(to + 3 * kTileColumns, d);
    }
#endif
  for (int64_t j = 0; j < columns; j++)
    for (int64_t k = j < done ? whole : 0; k < terms; k++)
      panel[k * kTileColumns + j] = from[k * right.row_step + j * right.column_step];
}

// Compute rows [first, last) of a product.
void multiply_rows(const Matrix& left, const Matrix& right, const Matrix& out, int64_t first, int64_t last) {
  constexpr int64_t kEdgeRows = 64;
  alignas(64) float panel[kTerms * kTileColumns], edge[kEdgeRows * kTileColumns];
  for (int64_t term = 0; term < left.columns; term += kTerms) {
    int64_t terms = std::min(kTerms, left.columns - term);
    for (int64_t column = 0; column < out.columns; column += kTileColumns) {
      int64_t columns = std::min<int64_t>(kTileColumns, out.columns - column), step = right.row_step;
      const float* from = right.data + term * step + column;
      if (right.column_step != 1 || columns < kTileColumns || step >= kWide) {
        pack(right, term, terms, column, columns, panel);
        from = panel, step = kTileColumns;
      }
      if (columns == kTileColumns) {
        add_block(left, term, terms, from, step, out.data + column, out.row_step, first, last);
        continue;
      }
      for (int64_t row = first; row < last; row += kEdgeRows) {  // a partial tile is computed in a buffer of full width
        int64_t end = std::min(last, row + kEdgeRows);
        float* to = edge - row * kTileColumns;
        for (int64_t i = row; i < end && term > 0; i++)
          std::memcpy(to + i * kTileColumns, out.data + i * out.row_step + column, columns * sizeof(float));
        add_block(left, term, terms, from, step, to, kTileColumns, row, end);
        for (int64_t i = row; i < end; i++)
          std::memcpy(out.data + i * out.row_step + column, to + i * kTileColumns, columns * sizeof(float));
      }
    }
  }
}

void multiply(const Matrix& left, const Matrix& right, const Matrix& out) {
  if (THREADS == 1 || left.rows * left.columns * right.columns < kShared)
    return multiply_rows(left, right, out, 0, left.rows);
  int64_t share = (left.rows + THREADS * kTileRows - 1) / (THREADS * kTileRows) * kTileRows;
#pragma omp parallel for num_threads(THREADS) schedule(static, 1)
  for (int part = 0; part < THREADS; part++)
    multiply_rows(left, right, out, std::min(part * share, left.rows), std::min((part + 1) * share, left.rows));
}

// The matrix of a tensor, or of one item of a batch.
Matrix matrix_of(const Tensor& tensor, int64_t item) {
  int64_t last = tensor.ndim - 1, offset = last == 2 ? item * tensor.strides[0] : 0;
  return {
      reinterpret_cast<float*>(tensor.data) + offset, tensor.sizes[last - 1], tensor.sizes[last],
      tensor.strides[last - 1], tensor.strides[last]};
}

// Multiply `[*, rows, terms]` by `[*, terms, columns]`; return false, with nothing done, if torch's libraries should.
bool multiplied(const Tensor& out, const Tensor& left, const Tensor& right) {
  if (out.dtype != aoti_torch_dtype_float32()) return false;
  const Matrix to = matrix_of(out, 0), from = matrix_of(right, 0);
  if (to.column_step != 1 || to.columns < kLanes || from.rows == 0) return false;
  if (to.rows < kFewRows && from.column_step != 1) return false;
  for (int64_t item = 0; item < (out.ndim == 3 ? out.sizes[0] : 1); item++)
    multiply(matrix_of(left, item), matrix_of(right, item), matrix_of(out, item));
  return true;
}

AOTITorchError mm_out(
    const RAIIAtenTensorHandle& out, const RAIIAtenTensorHandle& left, const RAIIAtenTensorHandle& right) {
  if (multiplied(*out.tensor(), *left.tensor(), *right.tensor())) return AOTI_TORCH_SUCCESS;
  return aoti_torch_cpu_mm_out(out, left, right);
}

AOTITorchError bmm_out(
    const RAIIAtenTensorHandle& out, const RAIIAtenTensorHandle& left, const RAIIAtenTensorHandle& right) {
  if (multiplied(*out.tensor(), *left.tensor(), *right.tensor())) return AOTI_TORCH_SUCCESS;
  return aoti_torch_cpu_bmm_out(out, left, right);
}

}  // namespace host

#define aoti_torch_cpu_mm_out host::mm_out
#define aoti_torch_cpu_bmm_out host::bmm_out
