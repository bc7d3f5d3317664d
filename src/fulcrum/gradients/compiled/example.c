/* The small example that a freshly compiled library must reproduce: out [n, m] = a [n, k] b [k, m]. */

void fulcrum_example(const float *restrict a, const float *restrict b, float *restrict out, int n, int k, int m)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j < m; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++)
                sum += a[i * k + l] * b[l * m + j];
            out[i * m + j] = sum;
        }
}
