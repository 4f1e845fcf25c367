/* Copies on a GPU: launches through the CUDA driver, followed by a flag in host memory that the stream sets. */
#include "kvc.h"

/* Launch the kernel of a job. Returns 0 or a CUresult. */
static int launch(const struct kvc_cuda *cuda, struct kvc_cuda_job *job)
{
    void *pointers[KVC_MAX_PARAMS];
    for (int64_t index = 0; index < job->num_params; index++)
        pointers[index] = &job->params[index];
    return cuda->launch_kernel(job->function, (unsigned)job->num_programs, 1, 1, (unsigned)job->num_threads, 1, 1,
                               (unsigned)job->shared_bytes, job->stream, pointers, NULL);
}

/* Set a flag after the work queued on a stream; a thread that sees it sees all writes. Returns 0 or a CUresult. */
static int write_fence(const struct kvc_cuda *cuda, void *stream, kvc_flag *fence, int64_t fence_value)
{
    return cuda->write_value(stream, (uint64_t)(uintptr_t)fence, (uint32_t)fence_value, 0);
}

/* Begin the copy of a chunk. */
int64_t kvc_copy_cuda(void *context, void *job_address, void *slot, kvc_flag *fence, int64_t fence_value)
{
    const struct kvc_cuda *cuda = context;
    struct kvc_cuda_job *job = job_address;
    job->params[job->slot_param] = (int64_t)(intptr_t)slot;
    int status = launch(cuda, job);
    return status ? status : write_fence(cuda, job->stream, fence, fence_value);
}

/* Begin a read, with all launches in one call. */
int64_t kvc_read_cuda(void *context, void *read_address, kvc_flag *fence, int64_t fence_value)
{
    const struct kvc_cuda *cuda = context;
    const struct kvc_cuda_read *read = read_address;
    struct kvc_cuda_job *jobs = (struct kvc_cuda_job *)((struct kvc_cuda_read *)read_address + 1);
    int status = cuda->memcpy_to_device(read->ids_there, read->ids_here, (size_t)read->ids_bytes, read->stream);
    for (int64_t index = 0; index < read->num_jobs && !status; index++)
        status = launch(cuda, &jobs[index]);
    /* after an error too, since kernels launched before it still run */
    int written = write_fence(cuda, read->stream, fence, fence_value);
    return status ? status : written;
}

enum { JOB_WORDS = sizeof(struct kvc_cuda_job) / sizeof(int64_t) };
_Static_assert(sizeof(struct kvc_cuda_job) % sizeof(int64_t) == 0, "a job is a row of words");

/* Write a span's jobs, each `row_words` after the one before it. Chunk `i` has the parts from `rows[i]` to
 * `rows[i + 1]`.
 *
 * `terms`, [4, word]: a launch of one part, and what a token further on at the source, one at the destination, and a
 * token more add to it. */
void kvc_fill_jobs(int64_t *first, int64_t row_words, int64_t num_jobs, const int64_t *terms, const int64_t *rows,
                   const struct kvc_launch *launch, const struct kvc_span *span)
{
    int64_t token_tiles = (span->num_tokens + launch->lead_tokens + launch->tile_tokens - 1) / launch->tile_tokens;
    for (int64_t index = 0; index < num_jobs; index++) {
        int64_t *words = first + index * row_words;
        int64_t part = rows[index], num_parts = rows[index + 1] - part;
        for (int word = 0; word < JOB_WORDS; word++)
            words[word] = terms[word] + span->src_further * terms[JOB_WORDS + word] +
                          span->dst_further * terms[2 * JOB_WORDS + word] +
                          span->more_tokens * terms[3 * JOB_WORDS + word];
        if (launch->src_ids >= 0) {
            words[launch->src_ids] = span->src_ids;
            words[launch->src_part] = span->src_part + part;
        }
        if (launch->dst_ids >= 0) {
            words[launch->dst_ids] = span->dst_ids;
            words[launch->dst_part] = span->dst_part + part;
        }
        int64_t num_tiles = num_parts * token_tiles * launch->tiles_beside;
        words[launch->num_token_tiles] = token_tiles;
        words[launch->num_tiles] = num_tiles;
        struct kvc_cuda_job *job = (struct kvc_cuda_job *)words;
        job->nbytes = num_parts * span->part_bytes;
        job->stream = (void *)(intptr_t)span->stream;
        bool is_capped = job->nbytes > span->max_uncapped_bytes && num_tiles > span->max_programs;
        job->num_programs = is_capped ? span->max_programs : num_tiles;
    }
}
