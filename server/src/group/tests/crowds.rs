//! Crowds in virtual time: the scheduler, and what it learns of step times, beside clients in a closed loop and a GPU
//! that computes nothing and takes as long as H200 were measured to take for 8B. What a rule of the scheduler does to
//! tokens a second and to the times that clients see shows here first.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use looplane_proto::worker::v1::{Admit, Finish, Outcome, Plan, SampledToken};

use crate::engine::GeneratedToken;
use crate::group::step_times::{StepTime, StepTimes};
use crate::sched::fake_worker::{Shape, mix, request};
use crate::sched::{Action, Event, Limits, Scheduler, Standing};

/// From the end of a step to the scheduler, and from the scheduler to the worker.
const HOST: Duration = Duration::from_micros(80);
/// Of a request before it is in the scheduler: HTTP, its template, its tokens.
const FRONT_END: Duration = Duration::from_millis(2);
const SLOTS: u32 = 512;
/// Until a crowd has settled.
const WARM_UP: Duration = Duration::from_secs(20);

/// What steps take, in seconds.
struct Gpu {
    name: &'static str,
    /// Rows of a step at most.
    most_rows: u32,
    /// Narrow and wide passes without attention, by rows.
    few: &'static [(f64, f64)],
    /// Matrix passes without attention, by rows.
    many: &'static [(f64, f64)],
    /// Steps of prompts by their rows, as they are timed at load, in that order, on a GPU that is not busy yet.
    timed: &'static [(u32, f64)],
    /// Attention of a row that decodes, for each position before it: alone, and beside prompts in matrix passes.
    decode_position: [f64; 2],
    /// The same of a row of a prompt: in wide passes, and in matrix passes.
    prompt_position: [f64; 2],
}

/// Most rows of a wide pass.
const MOST_FEW: u32 = 64;
/// Most rows of matrix passes whose times are known for each block.
const MOST_IN_ROUNDS: u32 = 512;

/// From docs/benchmarks.md and kernels/matrix/NOTES.md: steps at 512 positions less the reads of these; products behind
/// others, with the power of a busy GPU, of 16 streams with prompts of 1024 tokens up to 512 rows; the attention of a
/// prompt of 8192, of 64 rows of a prompt of 16 000, and of 64 and 224 rows beside prompts.
const ONE_H200: Gpu = Gpu {
    name: "one H200",
    most_rows: 2048,
    few: &[(1.0, 3.27e-3), (8.0, 3.45e-3), (16.0, 3.87e-3), (32.0, 3.9e-3), (64.0, 4.25e-3)],
    many: &[(128.0, 5.3e-3), (256.0, 8.7e-3), (384.0, 13.7e-3), (512.0, 15.1e-3), (1024.0, 27.4e-3), (2048.0, 52.5e-3)],
    timed: &[
        (64, 4.2e-3),
        (128, 5.09e-3),
        (256, 7.45e-3),
        (512, 12.35e-3),
        (1024, 23.45e-3),
        (2048, 47.14e-3),
        (384, 12.52e-3),
        (768, 20.88e-3),
        (1536, 36.09e-3),
    ],
    decode_position: [31e-9, 45e-9],
    prompt_position: [12.1e-9, 1.37e-9],
};

/// From the same; steps in which all rows decode from traces of 16 and 64 streams. Of 3072 and 4096 rows, which are two
/// passes in turns, as they were timed at load.
const FOUR_H200: Gpu = Gpu {
    name: "four H200",
    most_rows: 4096,
    few: &[(1.0, 1.0e-3), (8.0, 1.22e-3), (16.0, 1.77e-3), (32.0, 1.79e-3), (64.0, 2.26e-3)],
    many: &[
        (128.0, 4.6e-3),
        (256.0, 5.4e-3),
        (384.0, 7.1e-3),
        (512.0, 7.8e-3),
        (768.0, 10.6e-3),
        (1024.0, 12.8e-3),
        (1536.0, 18.1e-3),
        (2048.0, 21.5e-3),
        (3072.0, 32.2e-3),
        (4096.0, 38.1e-3),
    ],
    timed: &[
        (64, 2.32e-3),
        (128, 4.68e-3),
        (256, 5.38e-3),
        (512, 7.76e-3),
        (1024, 12.56e-3),
        (2048, 21.48e-3),
        (4096, 38.1e-3),
        (384, 7.09e-3),
        (768, 10.62e-3),
        (1536, 17.88e-3),
        (3072, 32.2e-3),
    ],
    decode_position: [7.8e-9, 11.5e-9],
    prompt_position: [3.0e-9, 0.435e-9],
};

impl Gpu {
    /// A step of so many rows, of which those that decode have `decoded` positions before them in all, those of prompts
    /// `prompted`.
    fn step(&self, decode_rows: u32, prompt_rows: u32, decoded: u64, prompted: u64) -> Duration {
        let rows = decode_rows + prompt_rows;
        let known = if rows <= MOST_FEW { self.few } else { self.many };
        // Matrix passes compute blocks of rows in rounds of the device.
        let is_whole = rows > MOST_FEW && rows <= MOST_IN_ROUNDS;
        let rows_of_time = if is_whole { rows.next_multiple_of(128) } else { rows };
        let above = known.partition_point(|&(knot, _)| knot < f64::from(rows_of_time)).clamp(1, known.len() - 1);
        let ((low, from), (high, to)) = (known[above - 1], known[above]);
        let products = from + (to - from) * (f64::from(rows_of_time) - low).max(0.0) / (high - low);
        let of_decode = self.decode_position[usize::from(prompt_rows > 0 && rows > MOST_FEW)];
        Duration::from_secs_f64(
            products
                + of_decode * decoded as f64
                + self.prompt_position[usize::from(rows > MOST_FEW)] * prompted as f64,
        )
    }
}

/// A group that applies plans as worker.proto says, as far as that takes time. (`FakeWorker` looks at every position
/// before each token, to check the plans: crowds would take minutes.)
struct Worker {
    gpu: &'static Gpu,
    slots: BTreeMap<u32, Slot>,
    /// Plans that were sent, and when they are here.
    held: VecDeque<(Duration, Plan)>,
    plan: Plan,
    /// The next step of the plan; `None` once it is over.
    step: Option<u32>,
}

struct Slot {
    admit: Admit,
    /// Positions.
    computed: u32,
    /// Tokens, those before a preemption included.
    generated: u32,
}

impl Worker {
    /// Runs a step; `None` if there is nothing to do at this time.
    fn run(&mut self, now: Duration) -> Option<(Outcome, StepTime)> {
        if self.step != Some(0)
            && let Some((_, plan)) = self.held.pop_front_if(|(here, _)| *here <= now)
        {
            plan.release.iter().for_each(|slot| drop(self.slots.remove(slot)));
            for admit in &plan.admit {
                let generated = admit.tokens.len() as u32 - admit.prompt_tokens;
                self.slots.insert(admit.slot, Slot { admit: admit.clone(), computed: 0, generated });
            }
            (self.plan, self.step) = (plan, Some(0));
        }
        let step = self.step?;
        let (mut tokens, mut prompt_rows, mut prompted, mut decode_rows, mut decoded) = (vec![], 0, 0, 0, 0);
        let chunks = if step == 0 { std::mem::take(&mut self.plan.prefill) } else { vec![] };
        for chunk in &chunks {
            let slot = self.slots.get_mut(&chunk.slot).expect("chunks are of slots in use");
            prompt_rows += chunk.len;
            prompted += u64::from(chunk.len) * u64::from(chunk.start + chunk.len / 2);
            slot.computed = chunk.start + chunk.len;
            if slot.computed == slot.admit.tokens.len() as u32 {
                tokens.push(slot.sample());
            }
        }
        for number in &self.plan.decode {
            let slot = self.slots.get_mut(number).expect("slots that decode are in use");
            let begins = chunks.iter().any(|chunk| chunk.slot == *number);
            if !begins && slot.generated < slot.admit.max_tokens {
                slot.computed += 1;
                decode_rows += 1;
                decoded += u64::from(slot.computed);
                tokens.push(slot.sample());
            }
        }
        let rows = prompt_rows + decode_rows;
        self.step = Some(step + 1).filter(|next| *next < self.plan.steps && rows > 0);
        if rows == 0 && step > 0 {
            return self.run(now);
        }
        let time = if rows > 0 { self.gpu.step(decode_rows, prompt_rows, decoded, prompted) } else { Duration::ZERO };
        let (version, step_ns) = (self.plan.version, time.as_nanos() as u64);
        let outcome = Outcome { version, step, ran_step: rows > 0, rows, tokens, step_ns, ..Outcome::default() };
        Some((outcome, StepTime { decode_rows, prompt_rows, time }))
    }
}

impl Slot {
    fn sample(&mut self) -> SampledToken {
        self.generated += 1;
        let sequence = self.admit.sequence;
        let token = (mix(sequence << 20 ^ u64::from(self.generated)) % 1000) as u32;
        let finish = if self.generated == self.admit.max_tokens { Finish::Length } else { Finish::None };
        SampledToken { sequence, token, finish: finish.into(), logprob: None, top: Vec::new() }
    }
}

/// Clients that send the next request once the one before is answered.
#[derive(Clone, Copy)]
struct Crowd {
    streams: u64,
    /// Tokens of a prompt, within 2 %; of a conversation, what each turn adds to it.
    prompt: u32,
    answer: u32,
    turns: u32,
    prefix_cache: bool,
}

#[derive(Default)]
struct Client {
    /// Of the conversation.
    tokens: Vec<u32>,
    turn: u32,
    asked: Duration,
    last_token: Option<Duration>,
}

/// What clients saw, in ms; with the 99th percentile behind the mean.
#[derive(Debug)]
struct Seen {
    tokens_a_second: f64,
    between_tokens: [f64; 2],
    first_token: [f64; 2],
}

enum Happens {
    Asked(usize),
    Ran(Outcome, StepTime),
}

struct World {
    crowd: Crowd,
    scheduler: Scheduler,
    times: StepTimes,
    worker: Worker,
    clients: Vec<Client>,
    /// Whose each sequence is.
    owners: BTreeMap<u64, usize>,
    /// What the scheduler learns, and when. Of equal times the first that was noted.
    happens: BTreeMap<(Duration, u64), Happens>,
    noted: u64,
    requests: u64,
    tokens: u64,
    between_tokens: Vec<Duration>,
    first_token: Vec<Duration>,
}

impl World {
    fn new(gpu: &'static Gpu, crowd: Crowd) -> Self {
        let limits = Limits {
            max_slots: SLOTS,
            max_batch_tokens: gpu.most_rows,
            max_waiting_requests: crowd.streams,
            prefix_cache: crowd.prefix_cache,
            ..Limits::default()
        };
        let mut scheduler = Scheduler::new(limits).expect("limits that can work");
        scheduler.leave_unchecked();
        let shape = Shape { max_slots: SLOTS, max_batch_tokens: gpu.most_rows, kv_pages: 12_000, page_positions: 64 };
        scheduler.apply(shape.ready(), &mut Vec::new());
        // As `timing` does.
        let mut times = StepTimes::new(true, None);
        times.set_max_rows(gpu.most_rows);
        for rows in [1, 8, 32, 64, 128, 256, 512] {
            let time = gpu.step(rows, 0, rows.into(), 0);
            times.observe(&StepTime { decode_rows: rows, prompt_rows: 0, time });
        }
        for &(rows, time) in gpu.timed {
            let time = Duration::from_secs_f64(time);
            times.observe(&StepTime { decode_rows: 0, prompt_rows: rows, time });
        }
        scheduler.limit_step_rows(times.rows());
        let (slots, held) = (BTreeMap::new(), VecDeque::new());
        let mut world = Self {
            crowd,
            scheduler,
            times,
            worker: Worker { gpu, slots, held, plan: Plan::default(), step: None },
            clients: (0..crowd.streams).map(|_| Client::default()).collect(),
            owners: BTreeMap::new(),
            happens: BTreeMap::new(),
            noted: 0,
            requests: 0,
            tokens: 0,
            between_tokens: Vec::new(),
            first_token: Vec::new(),
        };
        for client in 0..world.clients.len() {
            world.note(FRONT_END + Duration::from_micros(100) * client as u32, Happens::Asked(client));
        }
        world
    }

    fn note(&mut self, at: Duration, what: Happens) {
        self.noted += 1;
        self.happens.insert((at, self.noted), what);
    }

    /// A request of a client is in the scheduler.
    fn asked(&mut self, index: usize, at: Duration) {
        self.requests += 1;
        let range = u64::from(self.crowd.prompt / 25).max(1);
        let prompt = self.crowd.prompt - range as u32 / 2 + (mix(self.requests) % range) as u32;
        let mut request = request(self.requests, prompt, self.crowd.answer, vec![]);
        let client = &mut self.clients[index];
        client.tokens.append(&mut request.prompt);
        request.prompt.clone_from(&client.tokens);
        (client.asked, client.last_token) = (at - FRONT_END, None);
        let numbers = self.scheduler.submit(vec![request], &Standing::default()).expect("the queue has room");
        self.owners.insert(numbers.start, index);
    }

    /// The report of a step is here.
    fn ran(&mut self, outcome: Outcome, step: &StepTime, at: Duration) {
        self.times.observe(step);
        self.scheduler.limit_step_rows(self.times.rows());
        let mut actions = Vec::new();
        self.scheduler.apply(Event::Outcome(outcome), &mut actions);
        for action in actions {
            match action {
                Action::Prompt { .. } => {}
                Action::Token { sequence, token } => self.token(sequence, &token, at),
                Action::Finished { sequence, .. } => {
                    let index = self.owners.remove(&sequence).expect("sequences have clients");
                    let client = &mut self.clients[index];
                    client.turn = (client.turn + 1) % self.crowd.turns;
                    if client.turn == 0 {
                        client.tokens.clear();
                    }
                    self.note(at + FRONT_END, Happens::Asked(index));
                }
                Action::Failed { reason, .. } | Action::Fault(reason) => panic!("{reason}"),
                Action::Contradiction { sequence } => panic!("{sequence} contradicts itself"),
            }
        }
    }

    fn token(&mut self, sequence: u64, token: &GeneratedToken, at: Duration) {
        let client = &mut self.clients[self.owners[&sequence]];
        client.tokens.push(token.id);
        let before = client.last_token.replace(at);
        if at >= WARM_UP {
            self.tokens += 1;
            match before {
                Some(before) => self.between_tokens.push(at - before),
                None => self.first_token.push(at - client.asked),
            }
        }
    }

    fn run(mut self, seconds: u64) -> Seen {
        let (mut now, end) = (Duration::ZERO, WARM_UP + Duration::from_secs(seconds));
        while now < end {
            while let Some(next) = self.happens.first_entry().filter(|next| next.key().0 <= now) {
                let ((at, _), what) = next.remove_entry();
                match what {
                    Happens::Asked(client) => self.asked(client, at),
                    Happens::Ran(outcome, step) => self.ran(outcome, &step, at),
                }
                while let Some(plan) = self.scheduler.next_plan() {
                    self.worker.held.push_back((at + HOST, plan));
                }
            }
            if let Some((outcome, step)) = self.worker.run(now) {
                now += step.time;
                self.note(now + HOST, Happens::Ran(outcome, step));
            } else {
                let next = self.happens.first_key_value().map(|((at, _), _)| *at);
                let here = self.worker.held.front().map(|(here, _)| *here);
                now = next.into_iter().chain(here).min().expect("somebody waits for an answer");
            }
        }
        Seen {
            tokens_a_second: self.tokens as f64 / seconds as f64,
            between_tokens: mean_and_p99(self.between_tokens),
            first_token: mean_and_p99(self.first_token),
        }
    }
}

fn mean_and_p99(mut times: Vec<Duration>) -> [f64; 2] {
    times.sort_unstable();
    let mean = times.iter().sum::<Duration>() / times.len() as u32;
    [mean, times[(times.len() - 1) * 99 / 100]].map(|time| time.as_secs_f64() * 1e3)
}

fn crowd(prompt: u32, answer: u32, streams: u64) -> Crowd {
    Crowd { streams, prompt, answer, turns: 1, prefix_cache: true }
}

/// Of 8 turns.
fn chats(prefix_cache: bool) -> Crowd {
    Crowd { streams: 16, prompt: 1000, answer: 64, turns: 8, prefix_cache }
}

/// 16 streams with prompts of 1024 tokens: larger steps than those of 128 rows would bring prompts sooner, but tokens
/// more slowly, and in gaps.
#[test]
fn a_crowd_with_prompts_has_its_tokens_often_and_without_gaps() {
    let seen = World::new(&ONE_H200, crowd(1024, 128, 16)).run(20);
    assert!(seen.tokens_a_second > 2300.0 && seen.between_tokens[1] < 10.0, "{seen:?}");
    let seen = World::new(&ONE_H200, crowd(128, 256, 64)).run(20);
    assert!(seen.tokens_a_second > 11_400.0 && seen.between_tokens[1] < 10.0, "{seen:?}");
    // Few rows, again and again, are quicker than a matrix pass.
    let seen = World::new(&FOUR_H200, crowd(128, 256, 16)).run(20);
    assert!(seen.tokens_a_second > 8200.0 && seen.between_tokens[1] < 3.0, "{seen:?}");
}

#[test]
fn conversations_have_their_first_tokens_five_times_as_soon_with_a_cache() {
    let [with, without] = [true, false].map(|prefix_cache| World::new(&ONE_H200, chats(prefix_cache)).run(30));
    assert!(5.0 * with.first_token[0] < without.first_token[0], "{with:?}; without {without:?}");
    assert!(2.3 * without.tokens_a_second < with.tokens_a_second, "{with:?}; without {without:?}");
}

/// `just crowds`
#[test]
#[ignore = "a table"]
fn crowds_of_gpus() {
    for gpu in [&ONE_H200, &FOUR_H200] {
        println!("| {}: prompt -> answer, streams | tokens/s | ITL mean / p99, ms | TTFT mean / p99 |", gpu.name);
        println!("|---|---|---|---|");
        for crowd in [
            crowd(128, 256, 1),
            crowd(128, 256, 16),
            crowd(128, 256, 64),
            crowd(128, 256, 256),
            crowd(1024, 128, 16),
            crowd(1024, 128, 64),
            crowd(1024, 128, 256),
            crowd(8192, 128, 1),
            crowd(8192, 128, 8),
            chats(true),
            chats(false),
        ] {
            let Seen { tokens_a_second, between_tokens, first_token } = World::new(gpu, crowd).run(60);
            let Crowd { streams, prompt, answer, turns, prefix_cache } = crowd;
            let of_turns = if turns > 1 { format!("{turns} turns of ") } else { String::new() };
            let cache = if prefix_cache { "" } else { ", no cache" };
            let what = format!("{of_turns}{prompt} -> {answer}, {streams}{cache}");
            let [itl, ttft] = [between_tokens, first_token];
            println!(
                "| {what} | {tokens_a_second:.0} | {:.2} / {:.1} | {:.0} / {:.0} |",
                itl[0], itl[1], ttft[0], ttft[1]
            );
        }
    }
}
