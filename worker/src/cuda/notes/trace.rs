//! What traced launches note, and what it says: the time of each phase, and a timeline of every multiprocessor for
//! Perfetto or chrome://tracing.

use std::io::{self, Write};

use super::phase::{Phase, PhaseTime};
use super::roles::{NARROW, Roles, STEP_BEGUN, Shows, Stages};

/// Notes of a warp in a layer.
pub const STAGES: usize = 16;

/// Notes of a looped launch in its last step. The kernel's `reached` (sync/reached.cuh) writes them, and `note_time`
/// what clocks ran at.
#[derive(Debug, Clone)]
pub struct Trace {
    /// `[block][warp][layer, LM head][STAGES]` ns of the GPU's timer, or clocks; 0: not reached.
    values: Vec<i64>,
    pub(super) blocks: usize,
    warps: usize,
    pub(super) layers: usize,
    pub(super) roles: &'static Roles,
}

/// Clock and time when the launch began and ended, and the multiprocessor: stages of `Roles::clocks` with the LM head.
const BEGUN: usize = 8;
pub(super) const ENDED: usize = 10;
const MULTIPROCESSOR: usize = 12;

/// Times of the phases of a step that ran a launch each: `ends` is `[2 steps in turns][layer, LM head][phase]`, when
/// the last block ended it, in ns. The step before the last says when the last one began.
pub fn unlooped_phases(ends: &[i64], layers: usize, steps: u32) -> Vec<PhaseTime> {
    let count = Phase::ALL.len();
    let at = |step: u32, layer: usize, phase: Phase| {
        ends[((step as usize & 1) * (layers + 1) + layer) * count + phase as usize]
    };
    let last = steps - 1;
    let mut before = at(steps, layers, Phase::Choose);
    let mut times = Phase::ALL.map(|phase| PhaseTime { phase, us: 0.0, wait_us: None });
    let layer_phases = || NARROW.layer.iter().map(|stages| stages.0);
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
    pub fn new(values: Vec<i64>, blocks: usize, warps: usize, layers: usize, roles: &'static Roles) -> Self {
        assert!(values.len() >= blocks * warps * (layers + 1) * STAGES, "{} notes", values.len());
        Self { values, blocks, warps, layers, roles }
    }

    fn at(&self, block: usize, warp: usize, layer: usize, stage: usize) -> Option<i64> {
        let value = self.values[((block * self.warps + warp) * (self.layers + 1) + layer) * STAGES + stage];
        (value != 0).then_some(value)
    }

    /// When a warp was at a stage, in ns from when block 0 ended (a double has room for fractions of what is left
    /// then); `None`: it was not.
    pub(super) fn reached_ns(&self, block: usize, warp: usize, layer: usize, stage: usize) -> Option<f64> {
        let origin = self.at(0, self.roles.clocks, self.layers, ENDED + 1).unwrap_or(0);
        self.at(block, warp, layer, stage).map(|ns| (ns - origin) as f64)
    }

    /// Clock of the multiprocessors during the launch, their mean, in MHz.
    pub fn sm_mhz(&self) -> f64 {
        let mhz = |block| {
            let note = |stage| self.at(block, self.roles.clocks, self.layers, stage).unwrap_or(0);
            let (clocks, ns) = (note(ENDED) - note(BEGUN), note(ENDED + 1) - note(BEGUN + 1));
            clocks as f64 * 1e3 / ns.max(1) as f64
        };
        (0..self.blocks).map(mhz).sum::<f64>() / self.blocks as f64
    }

    /// Times of the phases: means over all consumer warps.
    pub fn phases(&self) -> Vec<PhaseTime> {
        let Roles { consumers, known_waits, .. } = *self.roles;
        let warps = || (0..self.blocks).flat_map(|block| (0..consumers).map(move |warp| (block, warp)));
        let slices: Vec<Slice> = warps().flat_map(|(block, warp)| self.consumer(block, warp)).collect();
        let mean = |phase, of: fn(&Slice) -> bool| {
            let sum: f64 = slices.iter().filter(|slice| slice.phase == phase && of(slice)).map(Slice::us).sum();
            sum / (self.blocks * consumers) as f64
        };
        let time = |phase| PhaseTime {
            phase,
            us: mean(phase, |_| true),
            wait_us: known_waits.contains(&phase).then(|| mean(phase, |slice| slice.waits)),
        };
        self.roles.phases().map(time).collect()
    }

    /// What a consumer warp did, in order.
    fn consumer(&self, block: usize, warp: usize) -> Vec<Slice> {
        let head = self.layers;
        let at = |layer, stage| self.reached_ns(block, warp, layer, stage);
        let mut slices = Vec::new();
        let mut put = |layer, phase, waits, from: Option<f64>, to: Option<f64>| {
            if let (Some(from), Some(to)) = (from, to) {
                slices.push(Slice { phase, layer, waits, from, to });
            }
        };
        let (phase, waits) = self.roles.begin;
        put(0, phase, waits, at(head, STEP_BEGUN), at(0, 0));
        for layer in 0..=head {
            let stages: &[Stages] = if layer == head { self.roles.head } else { self.roles.layer };
            for &(phase, from, arrived, to) in stages {
                let arrived = arrived.and_then(|stage| at(layer, stage));
                put(layer, phase, true, arrived.and(at(layer, from)), arrived);
                put(layer, phase, false, arrived.or(at(layer, from)), at(layer, to));
            }
        }
        slices
    }

    /// Writes the timeline: a process for each multiprocessor, with the tracks of the kernel's roles.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let blocks: Vec<[Vec<Event>; 4]> = (0..self.blocks).map(|block| self.timeline(block)).collect();
        let begun_ns = blocks.iter().flatten().flatten().map(|event| event.from).fold(f64::INFINITY, f64::min);
        let mut events = Events { out, first: true, begun_ns };
        events.out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        for (block, tracks) in blocks.iter().enumerate() {
            let sm = self.at(block, self.roles.clocks, self.layers, MULTIPROCESSOR).unwrap_or(0);
            events.name("process_name", sm, 0, &format!("SM {sm} (block {block})"))?;
            for (track, of) in self.roles.tracks.iter().enumerate() {
                events.name("thread_name", sm, track, of.name)?;
            }
            for (track, of) in tracks.iter().enumerate() {
                of.iter().try_for_each(|event| events.slice(sm, track, event))?;
            }
        }
        events.out.write_all(b"\n]}\n")
    }

    /// Of a block, by track.
    fn timeline(&self, block: usize) -> [Vec<Event>; 4] {
        self.roles.tracks.each_ref().map(|track| match track.shows {
            Shows::Phases => self.consumer(block, track.warp).into_iter().map(Event::from).collect(),
            Shows::Work(layer, head) => self.worked(block, track.warp, layer, head),
            Shows::Published(names) => self.published(block, track.warp, names),
        })
    }

    /// What a warp did from stage to stage.
    fn worked(&self, block: usize, warp: usize, names: &[&'static str], head: &'static str) -> Vec<Event> {
        let at = |layer, stage| self.reached_ns(block, warp, layer, stage);
        let mut events = Vec::new();
        for layer in 0..=self.layers {
            let names = if layer == self.layers { std::slice::from_ref(&head) } else { names };
            for (stage, name) in names.iter().enumerate() {
                let waits = name.starts_with("wait");
                if let (Some(from), Some(to)) = (at(layer, stage), at(layer, stage + 1))
                    && (layer == 0 || !waits)
                {
                    let kind = if waits { "wait" } else { "stream" };
                    events.push(Event { kind, name: (*name).to_owned(), layer, from, to });
                }
            }
        }
        events
    }

    /// From one publication to the next.
    fn published(&self, block: usize, warp: usize, names: &[&'static str]) -> Vec<Event> {
        let at = |warp, layer, stage| self.reached_ns(block, warp, layer, stage);
        let mut before = at(0, 0, 0);
        let mut events = Vec::new();
        for layer in 0..self.layers {
            for (stage, name) in names.iter().enumerate() {
                let now = at(warp, layer, stage);
                let slice = before.zip(now);
                events.extend(slice.map(|(from, to)| Event {
                    kind: "compute",
                    name: (*name).to_owned(),
                    layer,
                    from,
                    to,
                }));
                before = now.or(before);
            }
        }
        events
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

/// A slice of a track; from and to in ns.
struct Event {
    kind: &'static str,
    name: String,
    layer: usize,
    from: f64,
    to: f64,
}

impl From<Slice> for Event {
    fn from(Slice { phase, layer, waits, from, to }: Slice) -> Self {
        let (kind, name) = match waits {
            true => ("wait", format!("wait: {}", phase.name())),
            false => ("compute", phase.name().to_owned()),
        };
        Self { kind, name, layer, from, to }
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

    fn slice(&mut self, process: i64, track: usize, event: &Event) -> io::Result<()> {
        self.separator()?;
        let Event { kind, name, layer, from, to } = event;
        let (ts, dur) = ((from - self.begun_ns) / 1e3, (to - from) / 1e3);
        write!(self.out, r#"{{"ph":"X","name":"{name}","cat":"{kind}","pid":{process},"tid":{track},"#)?;
        write!(self.out, r#""ts":{ts:.3},"dur":{dur:.3},"args":{{"layer":{layer}}}}}"#)
    }
}

#[cfg(test)]
mod tests {
    use super::super::roles::WIDE;
    use super::*;

    const PRODUCER: usize = 16;
    const EPILOGUE: usize = 17;

    /// Two blocks whose clocks run at different rates; every stage takes a microsecond, but for one wait.
    fn trace() -> Trace {
        let (blocks, warps, layers) = (2, 19, 3);
        let mut values = vec![0; blocks * warps * (layers + 1) * STAGES];
        let place = |block: usize, warp: usize, layer: usize, stage: usize| {
            ((block * warps + warp) * (layers + 1) + layer) * STAGES + stage
        };
        for block in 0..blocks {
            let time = |us: i64| 5_000_000_000_000_000 + us * 1000;
            for (stage, us) in [(BEGUN, 0), (ENDED, 100)] {
                values[place(block, PRODUCER, layers, stage)] = 1_000_000 + us * (1500 + 500 * block as i64);
                values[place(block, PRODUCER, layers, stage + 1)] = time(us);
            }
            values[place(block, PRODUCER, layers, MULTIPROCESSOR)] = 7 + block as i64;
            for warp in 0..NARROW.consumers {
                values[place(block, warp, layers, STEP_BEGUN)] = time(3);
                for layer in 0..layers {
                    for stage in 0..=10 {
                        // Down's input comes 4 us late.
                        let late = if stage >= 9 { 4 } else { 0 };
                        values[place(block, warp, layer, stage)] = time(5 + 20 * layer as i64 + stage as i64 + late);
                    }
                }
                (0..3).for_each(|stage| values[place(block, warp, layers, stage)] = time(70 + stage as i64));
            }
            for layer in 0..layers {
                (0..7).for_each(|stage| {
                    values[place(block, PRODUCER, layer, stage)] = time(4 + 20 * layer as i64 + 2 * stage as i64)
                });
                (0..4).for_each(|stage| {
                    values[place(block, EPILOGUE, layer, stage)] = time(7 + 20 * layer as i64 + 3 * stage as i64)
                });
            }
        }
        Trace::new(values, blocks, warps, layers, &NARROW)
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
        // Clocks of 1500 and of 2000 a microsecond.
        assert!(near(trace().sm_mhz(), 1750.0));
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
        assert_eq!(waits, [(10.0, 5.0), (30.0, 5.0), (50.0, 5.0)]);
    }

    /// One block of a wide kernel, two layers.
    #[test]
    fn wide_passes_have_their_own_stages() {
        let (warps, layers) = (12, 2);
        let mut values = vec![0; warps * (layers + 1) * STAGES];
        let mut note = |warp: usize, layer: usize, stage: usize, us: i64| {
            values[(warp * (layers + 1) + layer) * STAGES + stage] = 70_000 + us * 1000;
        };
        for (stage, us) in [(BEGUN, 0), (ENDED, 200)] {
            note(WIDE.clocks, layers, stage + 1, us);
        }
        for warp in 0..WIDE.consumers {
            note(warp, layers, STEP_BEGUN, 1);
            for layer in 0..layers {
                let begun = 3 + 50 * layer as i64;
                let stages = [(0, 0), (1, 4), (2, 6), (12, 7), (3, 9), (4, 20), (5, 24), (6, 25), (7, 40), (9, 50)];
                stages.into_iter().for_each(|(stage, us)| note(warp, layer, stage, begun + us));
            }
            [(0, 103), (1, 110), (2, 115)].into_iter().for_each(|(stage, us)| note(warp, layers, stage, us));
        }
        for (stage, us) in [(0, 2), (1, 8), (2, 25), (3, 45)] {
            note(8, 0, stage, us);
        }
        let trace = Trace::new(values, 1, warps, layers, &WIDE);
        let told: Vec<_> = trace.phases().iter().map(|time| (time.phase, time.us.round(), time.wait_us)).collect();
        let expected = [
            (Phase::Embed, 2.0),
            (Phase::QueryKeyValue, 18.0),
            (Phase::Attend, 22.0),
            (Phase::AttentionOut, 10.0),
            (Phase::GateUp, 30.0),
            (Phase::Down, 20.0),
            (Phase::Head, 7.0),
            (Phase::Choose, 5.0),
        ];
        assert_eq!(told, expected.map(|(phase, us)| (phase, us, None)));

        let mut text = Vec::new();
        trace.write(&mut text).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let of = |track: u64, name: &str| {
            let events = json["traceEvents"].as_array().unwrap().iter();
            let found = events.filter(|event| event["ph"] == "X" && event["tid"] == track && event["name"] == name);
            found.map(|event| event["dur"].as_f64().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!((of(0, "stream qkv"), of(0, "stream gate/up and down")), (vec![6.0], vec![20.0]));
        assert_eq!((of(1, "attend"), of(2, "attend")), (vec![11.0; 2], vec![11.0; 2]));
        assert_eq!((of(1, "wait: qkv"), of(1, "qkv")), (vec![3.0; 2], vec![4.0, 2.0, 4.0, 2.0]));
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
            NARROW.layer.iter().zip(1..).for_each(|(stage, us)| end(layer, stage.0, us * 1000));
        }
        end(layers, Phase::Head, 9000);
        end(layers, Phase::Choose, 700);
        let us: Vec<f64> = unlooped_phases(&ends, layers, 3).iter().map(|time| time.us).collect();
        assert_eq!(us, [0.5, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 9.0, 0.7]);
    }
}
