/* The thread pool: every parallel part of a pass is one `parallel` call. */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include "cpu_vectors.h"

/* One parallel call at a time. `remaining` counts unclaimed items down; whoever takes it from v > 0 owns item
 * count - v. The job cannot change while an owned item is unfinished, so a late worker never reads a stale job. */

#define MAX_THREADS 256
#define SPIN_NS 100000 /* how long an idle worker looks for the next call before it sleeps */

typedef void (*item_fn)(const void *job, int64_t item);

static pthread_mutex_t call_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleep_condition = PTHREAD_COND_INITIALIZER;
static int wanted_threads = 1, started_workers = 0, fork_handler_set = 0;

static item_fn job_fn;
static const void *job_argument;
static int64_t job_count;
static _Alignas(64) atomic_llong remaining;
static _Alignas(64) atomic_llong finished;
static _Alignas(64) atomic_int sleepers;

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void run_items(void) {
    while (atomic_load_explicit(&remaining, memory_order_relaxed) > 0) {
        int64_t left = atomic_fetch_sub_explicit(&remaining, 1, memory_order_acq_rel);
        if (left <= 0) return;
        job_fn(job_argument, job_count - left);
        atomic_fetch_add_explicit(&finished, 1, memory_order_release);
    }
}

static void wait_for_items(void) {
    int64_t start = clock_ns();
    for (;;) {
        for (int i = 0; i < 200; i++) {
            if (atomic_load_explicit(&remaining, memory_order_relaxed) > 0) return;
            relax();
        }
        if (clock_ns() - start > SPIN_NS) break;
    }
    pthread_mutex_lock(&sleep_mutex);
    atomic_fetch_add(&sleepers, 1);
    while (atomic_load(&remaining) <= 0) pthread_cond_wait(&sleep_condition, &sleep_mutex);
    atomic_fetch_sub(&sleepers, 1);
    pthread_mutex_unlock(&sleep_mutex);
}

static void *worker(void *unused) {
    (void)unused;
    for (;;) {
        wait_for_items();
        run_items();
    }
    return NULL;
}

/* Threads do not survive a fork: the child starts its own at its first parallel call. */
static void forget_workers(void) {
    started_workers = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&remaining, 0);
    pthread_mutex_init(&call_mutex, NULL);
    pthread_mutex_init(&sleep_mutex, NULL);
    pthread_cond_init(&sleep_condition, NULL);
}

static void start_workers(void) {
    if (!fork_handler_set) {
        pthread_atfork(NULL, NULL, forget_workers);
        fork_handler_set = 1;
    }
    while (started_workers < wanted_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL) != 0) {
            wanted_threads = started_workers + 1;
            return;
        }
        pthread_detach(thread);
        started_workers++;
    }
}

static void parallel(item_fn fn, const void *argument, int64_t count) {
    if (wanted_threads == 1 || count == 1) {
        for (int64_t item = 0; item < count; item++) fn(argument, item);
        return;
    }
    pthread_mutex_lock(&call_mutex);
    start_workers();
    job_fn = fn;
    job_argument = argument;
    job_count = count;
    atomic_store_explicit(&finished, 0, memory_order_relaxed);
    atomic_store(&remaining, count);
    if (atomic_load(&sleepers) > 0) {
        pthread_mutex_lock(&sleep_mutex);
        pthread_cond_broadcast(&sleep_condition);
        pthread_mutex_unlock(&sleep_mutex);
    }
    run_items();
    for (int spins = 0; atomic_load_explicit(&finished, memory_order_acquire) < count; spins++) {
        if (spins < 20000) relax();
        else sched_yield(); /* more threads than free cores: let the worker that holds the last item run */
    }
    pthread_mutex_unlock(&call_mutex);
}

EXPORT void outrider_set_threads(int num_threads) {
    wanted_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
}
