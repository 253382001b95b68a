/*
 * A model of the thread pool and of core lending, for the model checker spin, explained in lab/docs/thread-pool.md.
 *
 * The code is thread_pool_code.py, which emits LLVM. "code:" names the method that an inline follows: each atomic
 * operation of the method is one step here, in the same order, on a word of the same name. The test
 * tests/kernels/cpu/test_thread_pool_model.py compares both, and runs spin over all orders of the steps: of the model in
 * each of its shapes, without failures, and with each of its defects (#ifdef), which must be found.
 *
 * left out: PROGRAM COUNTERS DOOR FIRST_THREAD_LINE POOL SCRATCH OWNER_LINE CORE_LINE BORROWED_NS OWNER PROCESSOR
 * (Words of the memory layout, constant while threads read them, or owned by the leader like STEP.)
 */

#ifdef POOL_SHAPE /* One worker with three threads, and one run. */
#define POOLS 1
#define THREADS 3
#define ALL_THREADS 3
#define FIRST_THREAD 0
#define RUNS 1
#define NUM_ENTRIES 1
#define WANTED(index) true
#define GATES 1
#define CORES 1
#define MAX_CLOCK 0
#endif

#ifdef RUNS_SHAPE /* One worker with two threads, and three runs that skip the second entry. */
#define POOLS 1
#define THREADS 2
#define ALL_THREADS 2
#define FIRST_THREAD 0
#define RUNS 3
#define NUM_ENTRIES 3
#define WANTED(index) (index != 1)
#define GATES 1
#define CORES 1
#define MAX_CLOCK 0
#endif

#ifdef BORROWER_SHAPE /* A worker with a borrower, whose core's owner has just died, and two runs. */
#define OWNER_DIED
#define POOLS 2
#define THREADS 2
#define ALL_THREADS 2
#define FIRST_THREAD 0
#define RUNS 2
#define NUM_ENTRIES 2
#define WANTED(index) true
#define GATES 3
#define CORES 2
#define MAX_CLOCK 2
#endif

#ifdef CALLS_SHAPE /* A worker with two borrowers of one owner's cores, of which the first calls the other. */
#define OWNER_DIED
#define POOLS 2
#define THREADS 3
#define ALL_THREADS 3
#define FIRST_THREAD 0
#define RUNS 1
#define NUM_ENTRIES 1
#define WANTED(index) true
#define GATES 3
#define CORES 3
#define MAX_CLOCK 2
#endif

#ifdef OWNER_SHAPE /* The table alone: a worker has runs, and may die, and another one borrows its core. */
#define TABLE_ALONE
#endif

#ifdef RIVALS_SHAPE /* The table alone: two workers, of which one may die, borrow a core that its owner leaves idle. */
#define TABLE_ALONE
#endif

#ifdef TABLE_ALONE
#define POOLS 3
#define THREADS 1
#define ALL_THREADS 3
#define FIRST_THREAD 0
#define RUNS 2
#define NUM_ENTRIES 1
#define WANTED(index) true
#define GATES 4
#define CORES 3
#define MAX_CLOCK 3
#endif

/* Writes of these leaders to the lending table are never read; OWNER_SHAPE covers them. */
#define LENDING_TABLE false

/* Steps of a pool whose interleavings the first two shapes cover. */
#ifdef OWNER_DIED
#define POOL_STEPS atomic
#else
#define POOL_STEPS
#endif

/* Times are ticks: only their order matters. At MAX_CLOCK time stops, and waits with a timeout end at once. */
#define LEASE_NS 2
#define LINGER_NS 1

#define _HELPER 0
#define _LEADER 1
#define _BORROWER 2

/* The program that spin generates defines its own BASE. */
#define BASE BASE_WORD

/* The words of memory, named like their offsets in the code. A pool's own gate has its pool's number. */
byte GATE[GATES], SLEEPERS[GATES];
bit OPEN[POOLS], STOP[POOLS];
byte BASE[POOLS], ENTRIES[POOLS], STEP[POOLS];
bit ACTIVE[ALL_THREADS];
byte DRAWN[POOLS * NUM_ENTRIES], DONE[POOLS * NUM_ENTRIES];
byte OWNED_UNTIL[CORES], LENT_UNTIL[CORES];

/* The machine: the clock, dead workers, and the word on which a thread sleeps in the kernel, or 0. */
byte clock;
bit dead[POOLS];
byte asleep[ALL_THREADS];

/* State for the properties, which no thread reads. */
byte run_of[POOLS];                 /* Number of the current run, or 0. */
byte inside[POOLS];                 /* Helpers and borrowers that may read the run's words. */
byte executed[POOLS * NUM_ENTRIES]; /* Executed work items, a bit each. */
byte slept_at[ALL_THREADS];         /* The value at which a thread went to sleep. */
byte held[ALL_THREADS];             /* The value of LENT_UNTIL that a borrower wrote, or 0: a variable in the code. */
byte kept_for[CORES];               /* The run for which an owner keeps its cores, or 0. */
byte lent_core[ALL_THREADS];        /* The core that the borrower borrows. */
byte died_at[POOLS];

/* -- the instructions of pillion.kernels.cpu.language.sync, one step each */

#define atomic_load(into, word) into = word
#define atomic_load_until(word, value) word == value
#define atomic_load_for_a_while(word) skip
#define atomic_swap(word, value) word = value
#define store_int(word, value) word = value
#define atomic_add(before, word, amount) d_step { before = word; word = word + amount }
#define atomic_raise(word, value) d_step { if :: word < value -> word = value :: else fi }
#define atomic_exchange(found, word, old, new) d_step { found = word; if :: found == old -> word = new :: else fi }
#define usleep() skip

/* Addresses of words on which threads sleep; 0 is no address. */
#define GATE_AT(gate) (1 + gate)
#define OWNER_AT(owner) (1 + GATES + owner)

/* Linux compares the word again, under the lock of wake-ups. */
inline futex_wait(slept_on, address, expected) {
  d_step {
    if
#ifdef DROP_THE_COMPARISON
    :: asleep[t] = address; slept_at[t] = expected
#else
    :: slept_on == expected -> asleep[t] = address; slept_at[t] = expected
    :: else
#endif
    fi
  }
  asleep[t] == 0
}

inline futex_wait_for(timed_on, timed_address, timed_value, limit) {
  d_step {
    if
    :: timed_on == timed_value -> asleep[t] = timed_address; wake_at = clock + limit
    :: else
    fi
  }
#ifdef WAIT_WITHOUT_A_LIMIT
  asleep[t] == 0;
#else
  d_step { asleep[t] == 0 || clock >= wake_at || clock == MAX_CLOCK -> asleep[t] = 0; wake_at = 0 }
#endif
}

inline futex_wake(woken_on, waking) {
  d_step {
    do
    :: i < ALL_THREADS -> if :: asleep[i] == waking -> asleep[i] = 0; slept_at[i] = 0 :: else fi; i++
    :: else -> break
    od;
    i = 0
  }
}

/* -- the gate */

/* code: sleep */
inline sleep(bed, passed) {
  do
  :: POOL_STEPS {
       atomic_load(value, GATE[bed]);
       if
       :: value > passed -> value = 0; break
       :: else
       fi;
#ifdef SLEEP_UNCOUNTED
       futex_wait(GATE[bed], GATE_AT(bed), value);
       d_step { atomic_add(i, SLEEPERS[bed], 1); i = 0; value = 0 }
#else
       d_step { atomic_add(i, SLEEPERS[bed], 1); i = 0 }
       futex_wait(GATE[bed], GATE_AT(bed), value);
       value = 0;
#endif
       d_step { atomic_add(i, SLEEPERS[bed], -1); i = 0 }
     }
  od
}

/* code: _poll */
inline poll(looked_at, until) {
  /* It may end at the first poll, and polls change nothing. */
  atomic_load_for_a_while(GATE[looked_at])
}

/* code: wait */
inline wait(place, known) {
  poll(place, known);
  sleep(place, known)
}

/* code: _move */
inline move(moved, target) {
  POOL_STEPS {
#ifdef COUNT_SLEEPERS_BEFORE_THE_MOVE
    atomic_load(sleepers, SLEEPERS[moved]);
    atomic_raise(GATE[moved], target);
#else
#ifdef MOVE_BACKWARDS
    atomic_swap(GATE[moved], target);
#else
    atomic_raise(GATE[moved], target);
#endif
    atomic_load(sleepers, SLEEPERS[moved]);
#endif
    d_step {
      if
      :: sleepers > 0 -> futex_wake(GATE[moved], GATE_AT(moved))
      :: else
      fi;
      do /* No wake-up is lost. */
      :: i < ALL_THREADS -> assert(asleep[i] != GATE_AT(moved) || slept_at[i] >= target); i++
      :: else -> break
      od;
      i = 0; sleepers = 0
    }
  }
}

/* -- a run's work */

/* Between these two a kernel executes the work item, in the memory of the run that the thread joined. */
inline begin_item(entry) {
  assert(run_of[p] == step);
  do /* Entries follow one another... */
  :: i < entry -> assert(!WANTED(i) || executed[p * NUM_ENTRIES + i] == (1 << THREADS) - 1); i++
  :: else -> break
  od;
  i = 0
}

inline end_item(entry) {
  assert(run_of[p] == step);
  assert(!(executed[p * NUM_ENTRIES + entry] & (1 << item))); /* ...and each work item is executed once. */
  executed[p * NUM_ENTRIES + entry] = executed[p * NUM_ENTRIES + entry] | (1 << item)
}

/* code: _execute_items */
inline execute_items(work_of) {
  do
#ifdef DRAW_IN_TWO_STEPS
  :: atomic_load(item, DRAWN[p * NUM_ENTRIES + work_of]); store_int(DRAWN[p * NUM_ENTRIES + work_of], item + 1);
#else
  :: atomic_add(item, DRAWN[p * NUM_ENTRIES + work_of], 1);
#endif
     assert(item < 3 * THREADS); /* Threads do not draw in vain repeatedly. */
     if
     :: item >= THREADS -> break
     :: else -> d_step { begin_item(work_of) }
     fi;
#ifdef MOVE_AT_THE_LAST_DRAW
     if
     :: item + 1 == THREADS -> move(p, base + work_of + 1)
     :: else
     fi;
#endif
     POOL_STEPS {
       d_step { end_item(work_of); atomic_add(done, DONE[p * NUM_ENTRIES + work_of], 1) }
#ifndef MOVE_AT_THE_LAST_DRAW
       if
       :: done + 1 == THREADS -> move(p, base + work_of + 1)
       :: else
       fi;
#endif
       done = 0
     };
     if
     :: item + 1 == THREADS -> break
     :: else
     fi
  od;
  item = 0
}

/* code: work */
inline work(role) {
  POOL_STEPS {
    d_step {
      base = BASE[p]; entries = ENTRIES[p]; step = STEP[p];
      assert(step == run_of[p]) /* A thread that joins sees the words of the run. */
    }
    atomic_load(index, GATE[p]); index = (index < base -> 0 : index - base)
  };
  do
  :: index >= entries -> break
  :: index < entries && !WANTED(index) -> index++
  :: index < entries && WANTED(index) ->
     if
     :: LENDING_TABLE && role == _LEADER -> keep_cores(LEASE_NS, step)
     :: else
     fi;
     if
     :: role == _BORROWER -> assert(!claimed); claimed = true /* It reads the table before each entry. */
     :: else
     fi;
     execute_items(index);
#ifndef BORROW_FOR_A_WHOLE_RUN
     if
     :: role == _BORROWER -> break
     :: else
     fi;
#endif
     POOL_STEPS {
       atomic_load(value, GATE[p]);
       if
       :: value <= base + index ->
          value = 0;
          if
          :: role != _LEADER -> break
          :: else -> wait(p, base + index)
          fi
       :: else -> value = 0
       fi;
       atomic_load(index, GATE[p]); index = index - base
     }
  od;
  index = 0; base = 0; entries = 0; step = 0; claimed = 0
}

/* code: _join */
inline join(kind) {
  POOL_STEPS {
#ifdef LOOK_AT_THE_DOOR_FIRST
    d_step { atomic_load(value, OPEN[p]); inside[p] = inside[p] + value }
    atomic_swap(ACTIVE[t], 1);
#else
    atomic_swap(ACTIVE[t], 1);
    d_step { atomic_load(value, OPEN[p]); inside[p] = inside[p] + value }
#endif
  };
  if
  :: value > 0 -> value = 0; work(kind); d_step { atomic_swap(ACTIVE[t], 0); inside[p]-- }
  :: else -> atomic_swap(ACTIVE[t], 0)
  fi
}

/* -- core lending. The table's words are times, so that a dead worker's entries need no cleanup. */

/* code: _keep_cores */
inline keep_cores(time_ns, kept_run) {
  time = clock;
#ifdef KEEP_CORES_FOR_EVER
  d_step { store_int(OWNED_UNTIL[p], 100); kept_for[p] = kept_run; time = 0 }
#else
  d_step { store_int(OWNED_UNTIL[p], time + time_ns); kept_for[p] = kept_run; time = 0 }
#endif
}

/* code: _give_back */
inline give_back() {
  if
  :: held[t] > 0 ->
     d_step {
#ifdef GIVE_BACK_WHAT_IS_ANOTHER_S
       atomic_swap(LENT_UNTIL[core], 0);
#else
       atomic_exchange(i, LENT_UNTIL[core], held[t], 0); i = 0;
#endif
       held[t] = 0
     }
  :: else
  fi
}

/* code: _claim */
inline claim(called) {
  d_step { time = clock; kept = (OWNED_UNTIL[owner] > time -> kept_for[owner] : 0) }
  atomic_load(owned, OWNED_UNTIL[owner]);
  atomic_load(lent, LENT_UNTIL[core]);
  if
  :: owned > time ->
     /* A dead worker's cores become free. */
     assert(!dead[owner] || time < died_at[owner] + LEASE_NS);
     give_back();
     if
     :: calls > 0 ->
        futex_wait_for(OWNED_UNTIL[owner], OWNER_AT(owner), owned,
        (owned - time < LEASE_NS -> owned - time : LEASE_NS))
     :: else
     fi
  :: else ->
     if
     :: calls > 0 -> move(calls, called)
     :: else
     fi;
     if
     :: lent <= time || lent == held[t] ->
        d_step {
#ifdef CLAIM_IN_TWO_STEPS
          store_int(LENT_UNTIL[core], time + LEASE_NS); held[t] = time + LEASE_NS;
#else
          atomic_exchange(i, LENT_UNTIL[core], lent, time + LEASE_NS);
          held[t] = (i == lent -> time + LEASE_NS : 0); i = 0;
#endif
          /* An owner that kept its cores before this thread's read keeps this one... */
          assert(!(held[t] && kept && kept_for[owner] == kept && OWNED_UNTIL[owner] > clock));
          do /* ...and one borrower has a core at a time. */
          :: i < ALL_THREADS ->
             assert(i == t || lent_core[i] != core || held[i] <= clock || held[t] <= clock);
             i++
          :: else -> break
          od;
          i = 0; lent_core[t] = core
        }
     :: else ->
        assert(!dead[1] || time < died_at[1] + LEASE_NS);
        held[t] = 0;
        if
        :: calls > 0 -> usleep()
        :: else
        fi
     fi
  fi;
  d_step { time = 0; kept = 0; owned = 0; lent = 0 }
}

/* -- the threads */

/* code: _wait_until_out */
inline wait_until_out(line) {
  atomic_load_until(ACTIVE[line], 0); usleep()
}

/* code: run */
inline pool_run(number, stopping) {
  POOL_STEPS {
    atomic_load(to, GATE[p]); to++;
#ifdef OPEN_THE_DOOR_FIRST
    d_step { atomic_swap(OPEN[p], !stopping); run_of[p] = number }
#endif
    d_step { /* Words without atomics, not read before the door is open. */
      store_int(ENTRIES[p], NUM_ENTRIES);
      store_int(STEP[p], number);
      store_int(BASE[p], to);
      do
      :: i < NUM_ENTRIES && !stopping ->
         store_int(DRAWN[p * NUM_ENTRIES + i], 0);
         store_int(DONE[p * NUM_ENTRIES + i], 0);
         executed[p * NUM_ENTRIES + i] = 0;
         i++
      :: else -> break
      od;
      i = 0
    }
#ifdef MOVE_BEFORE_THE_STOP
    move(p, to);
#endif
    if
    :: stopping -> atomic_swap(STOP[p], 1)
    :: else -> d_step { atomic_swap(OPEN[p], 1); run_of[p] = number }
    fi;
    move(p, to); to = 0
  };
  if
  :: stopping
  :: else ->
     work(_LEADER);
     POOL_STEPS {
       atomic_swap(OPEN[p], 0);
#ifndef LEAVE_HELPERS_INSIDE
       other = 1;
       do
       :: other < THREADS -> wait_until_out(FIRST_THREAD + other); other++
       :: else -> break
       od;
       other = 0;
#endif
       d_step {
         assert(inside[p] == 0); /* The run's memory is no longer read... */
         run_of[p] = 0;
         do /* ...and all of its work is done. Cleared to keep the search small. */
         :: i < NUM_ENTRIES ->
            assert(!WANTED(i) || executed[p * NUM_ENTRIES + i] == (1 << THREADS) - 1);
            executed[p * NUM_ENTRIES + i] = 0; DRAWN[p * NUM_ENTRIES + i] = 0; DONE[p * NUM_ENTRIES + i] = 0;
            i++
         :: else -> break
         od;
         i = 0
       }
     };
     if
     :: LENDING_TABLE -> keep_cores(LINGER_NS, 0); futex_wake(OWNED_UNTIL[p], OWNER_AT(p))
     :: else
     fi
  fi
}

/* The caller of ThreadPool.run, and of ThreadPool.close. */
proctype leader(byte p; byte t) {
  byte value, i, sleepers, index, base, entries, step, item, done, claimed, time, to, other, round;
  {
    do
    :: round < RUNS -> round++; pool_run(round, false)
    :: else -> break
    od;
    pool_run(0, true)
  } unless { dead[p] }
}

/* code: main */
proctype helper(byte p; byte t) {
  byte value, i, sleepers, index, base, entries, step, item, done, claimed, time, seen;
  do
  :: wait(p, seen);
     atomic_load(seen, GATE[p]);
     atomic_load(value, STOP[p]);
     if
     :: value > 0 -> break
     :: else -> join(_HELPER)
     fi
  od
}

/* Its sleeps_at and calls are the words SLEEPS_AT and CALLS of the thread's line. */
/* code: borrow */
proctype borrower(byte p; byte t; byte owner; byte core; byte sleeps_at; byte calls) {
  byte value, i, sleepers, index, base, entries, step, item, done, claimed, time, seen, to;
  byte kept, owned, lent, wake_at;
  {
    do
    :: if
       :: held[t] > 0 ->
          poll(p, seen);
          atomic_load(value, GATE[p]);
          if
          :: value <= seen -> value = 0; give_back()
          :: else -> value = 0
          fi
       :: else
       fi;
#ifndef CLAIM_AFTER_GIVING_BACK
       if
       :: held[t] == 0 -> sleep(sleeps_at, seen)
       :: else
       fi;
#endif
       atomic_load(to, GATE[p]);
       atomic_load(value, STOP[p]);
       if
       :: value > 0 -> break
       :: else
       fi;
       atomic_load(value, OPEN[p]);
       if
       :: value == 0 -> seen = to
       :: else ->
          value = 0;
          claim(to);
          if
          :: held[t] > 0 || calls == 0 -> seen = to
          :: else
          fi;
          if
          :: held[t] > 0 -> join(_BORROWER)
          :: else
          fi
       fi;
       value = 0; to = 0
    od;
    give_back();
#ifndef LEAVE_WITHOUT_A_CALL
    if
    :: calls > 0 -> atomic_load(to, GATE[p]); move(calls, to + 1)
    :: else
    fi
#endif
  } unless { dead[p] }
}

/* A leader's use of the table: it keeps its cores at each entry, and for a moment after each run. */
proctype lending(byte p; byte t) {
  byte time, i, round;
  {
    do
    :: round < RUNS ->
       round++;
       keep_cores(LEASE_NS, round);
       keep_cores(LINGER_NS, 0);
       futex_wake(OWNED_UNTIL[p], OWNER_AT(p))
    :: else -> break
    od
  } unless { dead[p] }
}

/* A borrower's use of the table: it claims the core, renews the loan, returns the core, or fails to. */
proctype borrowing(byte p; byte t; byte owner; byte core; byte calls) {
  byte value, i, sleepers, time, kept, owned, lent, wake_at, round;
  {
    do
    :: round < 2 -> round++; claim(0)
    :: held[t] > 0 -> give_back()
    :: round == 2 -> give_back(); break
    od
  } unless { dead[p] }
}

/* Time advances at any point. */
proctype ticking() {
  do
  :: clock < MAX_CLOCK -> clock++
  :: else -> break
  od
}

/* A worker may die at any point: all its threads at once, in any state. */
proctype dying(byte p) {
  d_step { dead[p] = 1; died_at[p] = clock }
}

init {
  atomic {
#ifdef POOL_SHAPE
    run leader(0, 0);
    run helper(0, 1);
    run helper(0, 2)
#endif
#ifdef RUNS_SHAPE
    run leader(0, 0);
    run helper(0, 1)
#endif
#ifdef BORROWER_SHAPE
    run leader(0, 0);
    run borrower(0, 1, 1, 1, 0, 2)
#endif
#ifdef CALLS_SHAPE
    run leader(0, 0);
    run borrower(0, 1, 1, 1, 0, 2);
    run borrower(0, 2, 1, 2, 2, 0)
#endif
#ifdef OWNER_DIED
    OWNED_UNTIL[1] = LEASE_NS; dead[1] = true;
    run ticking()
#endif
#ifdef OWNER_SHAPE
    run lending(2, 2);
    run borrowing(0, 0, 2, 2, 3);
    run ticking();
    run dying(2)
#endif
#ifdef RIVALS_SHAPE
    run borrowing(0, 0, 2, 2, 0);
    run borrowing(1, 1, 2, 2, 0);
    run ticking();
    run dying(1)
#endif
  }
}
