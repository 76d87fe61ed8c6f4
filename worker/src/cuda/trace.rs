//! What traced launches note, and what it says: the time of each phase, and a timeline of every multiprocessor for Perfetto
//! or chrome://tracing.

use std::io::{self, Write};

use super::gauge::STAGES;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Rows of the embedding. In the loop the first layer's `QueryKeyValue` waits for it.
    Embed,
    /// Norm, q, k and v, rotation, append to the KV cache.
    QueryKeyValue,
    /// Leaves of attention, and pages out of them.
    Attend,
    /// Pages of a head added up.
    Merge,
    /// Product with what attention gave, and residual.
    AttentionOut,
    /// Norm, gate and up, activation.
    GateUp,
    /// Down, and residual.
    Down,
    /// Norm, LM head.
    Head,
    /// The choice of the tokens.
    Choose,
}

/// Time of a phase in a step, in all layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PhaseTime {
    /// Which.
    pub phase: Phase,
    /// In microseconds: in the loop the mean over all consumer warps, of which each is in one phase at a time; else from the end of the
    /// launch before to the end of this.
    pub us: f64,
    /// How much of it warps waited for what other blocks compute, where that is known.
    pub wait_us: Option<f64>,
}

/// Notes of a looped launch in its last step. The kernel's `reached` (ops/phases.cuh) writes clocks, `note_time` sets them in relation.
#[derive(Debug, Clone)]
pub struct Trace {
    /// `[block][warp][layer, LM head][STAGES]` clocks; 0: not reached.
    values: Vec<i64>,
    blocks: usize,
    warps: usize,
    layers: usize,
}

/// Warps that consume, and roles after them.
const CONSUMERS: usize = 16;
const PRODUCER: usize = CONSUMERS;
const EPILOGUE: usize = CONSUMERS + 1;
/// Phases of a layer as a consumer's stages: from, where the input is there, to.
const LAYER_STAGES: [(Phase, usize, Option<usize>, usize); 6] = [
    (Phase::QueryKeyValue, 0, Some(1), 2),
    (Phase::Attend, 2, None, 3),
    (Phase::Merge, 3, None, 4),
    (Phase::AttentionOut, 4, Some(5), 6),
    (Phase::GateUp, 6, Some(7), 8),
    (Phase::Down, 8, Some(9), 10),
];
/// A consumer's stage, noted with the LM head: it begins to wait for the tokens of the step before.
const STEP_BEGUN: usize = 3;
/// The producer's stages of a layer.
const STREAM_STAGES: [&str; 6] =
    ["stream qkv", "wait for tokens", "stream pages", "stream o", "stream gate/up", "stream down"];
/// What the epilogue publishes, stage by stage.
const PUBLISHED: [&str; 4] = ["q, k, v", "residual after o", "activation", "residual after down"];
/// Clock and time when the launch began and ended, and the multiprocessor: stages of the producer with the LM head.
const BEGUN: usize = 8;
const ENDED: usize = 10;
const MULTIPROCESSOR: usize = 12;

impl Phase {
    /// In the order of a step.
    pub const ALL: [Self; 9] = [
        Self::Embed,
        Self::QueryKeyValue,
        Self::Attend,
        Self::Merge,
        Self::AttentionOut,
        Self::GateUp,
        Self::Down,
        Self::Head,
        Self::Choose,
    ];

    /// What tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::QueryKeyValue => "qkv",
            Self::Attend => "attend",
            Self::Merge => "merge",
            Self::AttentionOut => "o",
            Self::GateUp => "gate/up",
            Self::Down => "down",
            Self::Head => "head",
            Self::Choose => "choose",
        }
    }
}

/// Times of the phases of a step that ran a launch each: `ends` is `[2 steps in turns][layer, LM head][phase]`, when the last block
/// ended it, in ns. The step before the last says when the last one began.
pub fn unlooped_phases(ends: &[i64], layers: usize, steps: u32) -> Vec<PhaseTime> {
    let count = Phase::ALL.len();
    let at = |step: u32, layer: usize, phase: Phase| {
        ends[((step as usize & 1) * (layers + 1) + layer) * count + phase as usize]
    };
    let last = steps - 1;
    let mut before = at(steps, layers, Phase::Choose);
    let mut times = Phase::ALL.map(|phase| PhaseTime { phase, us: 0.0, wait_us: None });
    let layer_phases = || LAYER_STAGES.iter().map(|stage| stage.0);
    let order = (0..layers).flat_map(|layer| layer_phases().map(move |phase| (layer, phase)));
    for (layer, phase) in
        std::iter::once((0, Phase::Embed)).chain(order).chain([(layers, Phase::Head), (layers, Phase::Choose)])
    {
        let end = at(last, layer, phase);
        times[phase as usize].us += (end - before) as f64 / 1e3;
        before = end;
    }
    times.to_vec()
}

impl Trace {
    /// From what the kernel wrote.
    pub fn new(values: Vec<i64>, blocks: usize, warps: usize, layers: usize) -> Self {
        assert!(values.len() >= blocks * warps * (layers + 1) * STAGES, "{} notes", values.len());
        Self { values, blocks, warps, layers }
    }

    fn at(&self, block: usize, warp: usize, layer: usize, stage: usize) -> Option<i64> {
        let clock = self.values[((block * self.warps + warp) * (self.layers + 1) + layer) * STAGES + stage];
        (clock != 0).then_some(clock)
    }

    /// Nanoseconds of the time that all multiprocessors share at a clock of a block.
    fn time_ns(&self, block: usize, clock: i64) -> f64 {
        let note = |stage| self.at(block, PRODUCER, self.layers, stage).unwrap_or(0);
        let (clocks, times) = (note(ENDED) - note(BEGUN), note(ENDED + 1) - note(BEGUN + 1));
        let rate = if clocks == 0 { 0.0 } else { times as f64 / clocks as f64 };
        // The shared time when block 0 has ended: a double has room for fractions of what is left.
        let origin = self.at(0, PRODUCER, self.layers, ENDED + 1).unwrap_or(0);
        (note(BEGUN + 1) - origin) as f64 + (clock - note(BEGUN)) as f64 * rate
    }

    /// Times of the phases: means over all consumer warps.
    pub fn phases(&self) -> Vec<PhaseTime> {
        let mut sums = Phase::ALL.map(|phase| PhaseTime { phase, us: 0.0, wait_us: Some(0.0) });
        for (block, warp) in (0..self.blocks).flat_map(|block| (0..CONSUMERS).map(move |warp| (block, warp))) {
            for slice in self.consumer(block, warp) {
                let of = &mut sums[slice.phase as usize];
                let us = slice.us() / (self.blocks * CONSUMERS) as f64;
                of.us += us;
                *of.wait_us.get_or_insert(0.0) += if slice.waits { us } else { 0.0 };
            }
        }
        // Attention's waits lie within its leaves; a step's embedding within the first layer.
        for of in &mut sums {
            if matches!(of.phase, Phase::Attend | Phase::Merge) {
                of.wait_us = None;
            }
        }
        sums.into_iter().filter(|of| of.phase != Phase::Embed).collect()
    }

    /// What a consumer warp did, in order.
    fn consumer(&self, block: usize, warp: usize) -> Vec<Slice> {
        let head = self.layers;
        let at = |layer, stage| self.at(block, warp, layer, stage).map(|clock| self.time_ns(block, clock));
        let mut slices = Vec::new();
        let mut put = |layer, phase, waits, from: Option<f64>, to: Option<f64>| {
            if let (Some(from), Some(to)) = (from, to) {
                slices.push(Slice { phase, layer, waits, from, to });
            }
        };
        put(0, Phase::Choose, true, at(head, STEP_BEGUN), at(0, 0));
        let head_stages = [(Phase::Head, 0, Some(1), 2)];
        for layer in 0..=head {
            let stages = if layer == head { &head_stages[..] } else { &LAYER_STAGES[..] };
            for &(phase, from, arrived, to) in stages {
                let arrived = arrived.and_then(|stage| at(layer, stage));
                put(layer, phase, true, arrived.and(at(layer, from)), arrived);
                put(layer, phase, false, arrived.or(at(layer, from)), at(layer, to));
            }
        }
        slices
    }

    /// Writes the timeline: a process for each multiprocessor, with a track for the stream, the first and the last consumer warp and
    /// an epilogue warp.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let begun = (0..self.blocks).flat_map(|block| self.streamed(block)).map(|slice| slice.2);
        let begun_ns = begun.fold(f64::INFINITY, f64::min);
        let mut events = Events { out, first: true, begun_ns };
        events.out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        for block in 0..self.blocks {
            let sm = self.at(block, PRODUCER, self.layers, MULTIPROCESSOR).unwrap_or(0);
            events.name("process_name", sm, 0, &format!("SM {sm} (block {block})"))?;
            let tracks = ["stream", "consumer 0 (has attention)", "consumer 15 (merges)", "epilogue"];
            for (track, name) in tracks.into_iter().enumerate() {
                events.name("thread_name", sm, track, name)?;
            }
            for (layer, name, from, to) in self.streamed(block) {
                events.slice(sm, 0, if name.starts_with("wait") { "wait" } else { "stream" }, name, layer, from, to)?;
            }
            for (track, warp) in [(1, 0), (2, CONSUMERS - 1)] {
                for slice in self.consumer(block, warp) {
                    let (kind, name) = match slice.waits {
                        true => ("wait", format!("wait: {}", slice.phase.name())),
                        false => ("compute", slice.phase.name().to_owned()),
                    };
                    events.slice(sm, track, kind, &name, slice.layer, slice.from, slice.to)?;
                }
            }
            for (layer, name, from, to) in self.published(block) {
                events.slice(sm, 3, "compute", name, layer, from, to)?;
            }
        }
        events.out.write_all(b"\n]}\n")
    }

    /// The producer's slices.
    fn streamed(&self, block: usize) -> Vec<(usize, &'static str, f64, f64)> {
        let at = |layer, stage| self.at(block, PRODUCER, layer, stage).map(|clock| self.time_ns(block, clock));
        let layer_slices = (0..self.layers).flat_map(|layer| {
            let named = STREAM_STAGES.into_iter().enumerate();
            // Only the first layer waits for tokens.
            let named = named.filter(move |(stage, _)| layer == 0 || *stage != 1);
            named.filter_map(move |(stage, name)| Some((layer, name, at(layer, stage)?, at(layer, stage + 1)?)))
        });
        let head = at(self.layers, 0).zip(at(self.layers, 1)).map(|(from, to)| (self.layers, "stream head", from, to));
        layer_slices.chain(head).collect()
    }

    /// From one publication of the epilogue to the next.
    fn published(&self, block: usize) -> Vec<(usize, &'static str, f64, f64)> {
        let at = |layer, stage| self.at(block, EPILOGUE, layer, stage).map(|clock| self.time_ns(block, clock));
        let mut before = self.at(block, 0, 0, 0).map(|clock| self.time_ns(block, clock));
        let mut slices = Vec::new();
        for layer in 0..self.layers {
            for (stage, name) in PUBLISHED.into_iter().enumerate() {
                let now = at(layer, stage);
                slices.extend(before.zip(now).map(|(from, to)| (layer, name, from, to)));
                before = now.or(before);
            }
        }
        slices
    }
}

/// A consumer warp in a phase, or waiting for its input; from and to in ns.
struct Slice {
    phase: Phase,
    layer: usize,
    waits: bool,
    from: f64,
    to: f64,
}

impl Slice {
    fn us(&self) -> f64 {
        (self.to - self.from) / 1e3
    }
}

/// Writes events of the Chrome trace format.
struct Events<'a, W> {
    out: &'a mut W,
    first: bool,
    /// Where the timeline begins.
    begun_ns: f64,
}

impl<W: Write> Events<'_, W> {
    fn separator(&mut self) -> io::Result<()> {
        let separator: &[u8] = if std::mem::replace(&mut self.first, false) { b"\n" } else { b",\n" };
        self.out.write_all(separator)
    }

    fn name(&mut self, what: &str, process: i64, track: usize, name: &str) -> io::Result<()> {
        self.separator()?;
        write!(self.out, r#"{{"ph":"M","name":"{what}","pid":{process},"tid":{track},"args":{{"name":"{name}"}}}}"#)
    }

    #[allow(clippy::too_many_arguments)]
    fn slice(
        &mut self,
        process: i64,
        track: usize,
        kind: &str,
        name: &str,
        layer: usize,
        from_ns: f64,
        to_ns: f64,
    ) -> io::Result<()> {
        self.separator()?;
        let (ts, dur) = ((from_ns - self.begun_ns) / 1e3, (to_ns - from_ns) / 1e3);
        write!(
            self.out,
            r#"{{"ph":"X","name":"{name}","cat":"{kind}","pid":{process},"tid":{track},"ts":{ts:.3},"dur":{dur:.3},"args":{{"layer":{layer}}}}}"#
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two blocks whose clocks run at different rates and begin anywhere; every stage takes a microsecond, but for one wait.
    fn trace() -> Trace {
        let (blocks, warps, layers) = (2, 19, 3);
        let mut values = vec![0; blocks * warps * (layers + 1) * STAGES];
        let place = |block: usize, warp: usize, layer: usize, stage: usize| {
            ((block * warps + warp) * (layers + 1) + layer) * STAGES + stage
        };
        for block in 0..blocks {
            let clock = |us: i64| 1_000_000 + 77 * block as i64 + us * (1500 + 500 * block as i64);
            for (stage, us) in [(BEGUN, 0), (ENDED, 100)] {
                values[place(block, PRODUCER, layers, stage)] = clock(us);
                values[place(block, PRODUCER, layers, stage + 1)] = 5_000_000_000_000_000 + us * 1000;
            }
            values[place(block, PRODUCER, layers, MULTIPROCESSOR)] = 7 + block as i64;
            for warp in 0..CONSUMERS {
                values[place(block, warp, layers, STEP_BEGUN)] = clock(3);
                for layer in 0..layers {
                    for stage in 0..=10 {
                        // Down's input comes 4 us late.
                        let late = if stage >= 9 { 4 } else { 0 };
                        values[place(block, warp, layer, stage)] = clock(5 + 20 * layer as i64 + stage as i64 + late);
                    }
                }
                (0..3).for_each(|stage| values[place(block, warp, layers, stage)] = clock(70 + stage as i64));
            }
            for layer in 0..layers {
                (0..7).for_each(|stage| {
                    values[place(block, PRODUCER, layer, stage)] = clock(4 + 20 * layer as i64 + 2 * stage as i64)
                });
                (0..4).for_each(|stage| {
                    values[place(block, EPILOGUE, layer, stage)] = clock(7 + 20 * layer as i64 + 3 * stage as i64)
                });
            }
        }
        Trace::new(values, blocks, warps, layers)
    }

    #[test]
    fn phases_are_means_over_warps_whatever_their_clocks() {
        let phases = trace().phases();
        let of = |phase| phases.iter().find(|time| time.phase == phase).copied().unwrap();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(near(of(Phase::Choose).us, 2.0) && near(of(Phase::Head).us, 2.0));
        assert!(near(of(Phase::QueryKeyValue).us, 6.0) && near(of(Phase::QueryKeyValue).wait_us.unwrap(), 3.0));
        assert!(near(of(Phase::Attend).us, 3.0) && of(Phase::Attend).wait_us.is_none());
        assert!(near(of(Phase::Down).us, 18.0) && near(of(Phase::Down).wait_us.unwrap(), 15.0));
        assert_eq!(phases.len(), 8);
    }

    #[test]
    fn the_timeline_is_json_and_slices_of_a_track_follow_each_other() {
        let mut text = Vec::new();
        trace().write(&mut text).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events.iter().filter(|event| event["name"] == "process_name").collect();
        assert_eq!(names.len(), 2);
        assert_eq!(names[1]["args"]["name"], "SM 8 (block 1)");
        let mut tracks = std::collections::HashMap::new();
        for event in events.iter().filter(|event| event["ph"] == "X") {
            let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            let end = tracks.entry((event["pid"].as_i64(), event["tid"].as_i64())).or_insert(-1.0);
            assert!(ts + 2e-3 >= *end && dur > 0.0, "{event}");
            *end = ts + dur;
        }
        assert_eq!(tracks.len(), 8);
        let waits =
            events.iter().filter(|event| event["name"] == "wait: down" && event["pid"] == 7 && event["tid"] == 1);
        let waits: Vec<_> =
            waits.map(|event| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap())).collect();
        assert_eq!(waits, [(9.0, 5.0), (29.0, 5.0), (49.0, 5.0)]);
    }

    #[test]
    fn launches_of_a_phase_take_from_the_end_of_the_one_before() {
        // Two layers; the third step is in the place of the first.
        let (layers, count) = (2, Phase::ALL.len());
        let mut ends = vec![0; 2 * (layers + 1) * count];
        ends[((layers + 1) + layers) * count + Phase::Choose as usize] = 1000;
        let mut now = 1000;
        let mut end = |layer: usize, phase: Phase, ns: i64| {
            now += ns;
            ends[layer * count + phase as usize] = now;
        };
        end(0, Phase::Embed, 500);
        for layer in 0..layers {
            LAYER_STAGES.iter().zip(1..).for_each(|(stage, us)| end(layer, stage.0, us * 1000));
        }
        end(layers, Phase::Head, 9000);
        end(layers, Phase::Choose, 700);
        let us: Vec<f64> = unlooped_phases(&ends, layers, 3).iter().map(|time| time.us).collect();
        assert_eq!(us, [0.5, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 9.0, 0.7]);
    }
}
