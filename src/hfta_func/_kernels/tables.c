// Rows of tables of M members, moved by their numbers.

// Adds row from[k] of x, times weight[k], to row to[k] of y, for each k of each member; without `from` or `to` it is row k.
// Rows of y that are written without `to` are new. What goes to row `padding` is left out. Returns whether a row is missing.
int move_rows(count models, count moves, count width, const REAL *restrict x, count x_rows, REAL *restrict y, count y_rows,
              const int64_t *from, count from_model, const int64_t *to, count to_model, const REAL *weight, count weight_model,
              count padding, count threads)
{
    int missing = 0;
#pragma omp parallel for num_threads(threads) if (models * moves * width > 1 << 15) schedule(static) reduction(| : missing)
    for (count model = 0; model < models; model++)
        for (count k = 0; k < moves; k++) {
            const count source = from ? from[model * from_model + k] : k, target = to ? to[model * to_model + k] : k;
            if (to && target == padding)
                continue;
            if (source < 0 || source >= x_rows || target < 0 || target >= y_rows) {
                missing = 1;
                break;
            }
            const REAL *restrict read = x + (model * x_rows + source) * width;
            REAL *restrict into = y + (model * y_rows + target) * width;
            const REAL factor = weight ? weight[model * weight_model + k] : 1;
            if (!to)
                memcpy(into, read, sizeof(REAL) * width);
            else
                for (count i = 0; i < width; i++)
                    into[i] += factor * read[i];
        }
    return missing;
}
