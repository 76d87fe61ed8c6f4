//! Which terminals may be longer than a character.
//!
//! A *position* is a place in the grammar where a terminal is read, as in Glushkov's construction. From the positions
//! that may begin a text, and from those that may stand behind each other, follows which may be read at the same
//! moment. A longer terminal is whole where none of these begins with a character of it: reading the longest is then
//! the only way to read. All of that is told too widely rather than too narrowly, so that what is whole may be.

use super::{Class, Node, parse::Grammar};

/// Positions of a grammar that is looked at. Of a larger one all terminals are single characters.
const MOST_POSITIONS: usize = 1024;
/// The work that is done for it: words of bits, and pairs of positions.
const MOST_WORK: usize = 30_000_000;
/// Nodes of a rule that takes the place of its name.
const MOST_NODES: usize = 64;
/// Nodes of all of these.
const MOST_COPIED: usize = 10_000;

/// Copies of a class that is repeated a number of times.
const MOST_COPIES: u32 = 8;

/// Makes runs of the classes that are repeated without end, those of rules without rules among them: `(a | [bc] | x)*`
/// says the same as `([abc]+ | x)*`.
pub(super) fn gather(grammar: &mut Grammar) {
    let leaves: Vec<Option<Node>> =
        grammar.rules.iter().map(|rule| Some(rule.body.clone()).filter(|body| is_leaf(body, &mut 0))).collect();
    let mut leaves = Leaves { bodies: leaves, copied: 0 };
    grammar.rules.iter_mut().for_each(|rule| gather_in(&mut rule.body, &mut leaves));
}

/// Rules without rules among them.
struct Leaves {
    /// `[rule]`
    bodies: Vec<Option<Node>>,
    /// Nodes that were taken for names.
    copied: usize,
}

fn is_leaf(node: &Node, nodes: &mut usize) -> bool {
    *nodes += 1;
    *nodes <= MOST_NODES
        && match node {
            Node::Rule(_) => false,
            Node::All(inner) | Node::Any(inner) => inner.iter().all(|node| is_leaf(node, nodes)),
            Node::Repeated(inner, ..) => is_leaf(inner, nodes),
            Node::Class(_) | Node::Run(_) | Node::Text(_) => true,
        }
}

fn gather_in(node: &mut Node, leaves: &mut Leaves) {
    match node {
        Node::All(inner) | Node::Any(inner) => inner.iter_mut().for_each(|node| gather_in(node, leaves)),
        Node::Repeated(inner, least, None) if *least <= 1 => {
            let (mut ranges, mut others) = (Class::new(), Vec::new());
            alternatives(inner, leaves, &mut ranges, &mut others);
            others.iter_mut().for_each(|node| gather_in(node, leaves));
            if ranges.is_empty() {
                gather_in(inner, leaves);
                return;
            }
            others.insert(0, Node::Run(merged(ranges)));
            **inner = if others.len() == 1 { others.remove(0) } else { Node::Any(others) };
        }
        // So that what stands behind the last is not taken to stand behind the first.
        Node::Repeated(inner, least @ 1..=MOST_COPIES, most) if matches!(**inner, Node::Class(_)) => {
            let mut all = vec![(**inner).clone(); *least as usize];
            match most.map(|most| most - *least) {
                Some(0) => {}
                more => {
                    all.push(Node::Repeated(inner.clone(), 0, more));
                    gather_in(all.last_mut().expect("one was pushed"), leaves);
                }
            }
            *node = Node::All(all);
        }
        Node::Repeated(inner, ..) => gather_in(inner, leaves),
        Node::Class(_) | Node::Run(_) | Node::Text(_) | Node::Rule(_) => {}
    }
}

fn alternatives(node: &Node, leaves: &mut Leaves, ranges: &mut Class, others: &mut Vec<Node>) {
    match node {
        Node::Class(class) => ranges.extend(class),
        Node::Any(inner) => inner.iter().for_each(|node| alternatives(node, leaves, ranges, others)),
        Node::Rule(rule) => match leaves.bodies[*rule].clone() {
            Some(body) if leaves.copied <= MOST_COPIED => {
                leaves.copied += MOST_NODES;
                alternatives(&body, leaves, ranges, others);
            }
            _ => others.push(node.clone()),
        },
        other => others.push(other.clone()),
    }
}

fn merged(mut ranges: Class) -> Class {
    ranges.sort_unstable();
    let mut class = Class::new();
    for (first, last) in ranges {
        match class.last_mut() {
            Some(before) if first <= before.1 + 1 => before.1 = before.1.max(last),
            _ => class.push((first, last)),
        }
    }
    class
}

fn overlap(one: &[(u32, u32)], other: &[(u32, u32)]) -> bool {
    one.iter().any(|(first, last)| other.iter().any(|(from, to)| first <= to && from <= last))
}

/// What is read at a position.
#[derive(Debug, Clone)]
enum Read {
    /// One character.
    Single(Class),
    Run(Class),
    Text(Vec<u32>),
}

impl Read {
    fn first(&self) -> Class {
        match self {
            Self::Single(class) | Self::Run(class) => class.clone(),
            Self::Text(text) => vec![(text[0], text[0])],
        }
    }

    /// Both may be read at the same moment and the same text.
    fn coincides(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Single(one), Self::Single(other)) => overlap(one, other),
            (Self::Text(one), Self::Text(other)) => one == other,
            _ => false,
        }
    }

    /// Where both may be read, the longest is not the only way.
    fn conflicts(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Single(_), Self::Single(_)) => false,
            (Self::Text(one), Self::Text(other)) => one != other && (one.starts_with(other) || other.starts_with(one)),
            _ => overlap(&self.first(), &other.first()),
        }
    }
}

type Bits = Vec<u64>;

fn set(bits: &mut [u64], index: usize) -> bool {
    let before = bits[index / 64];
    bits[index / 64] |= 1 << (index % 64);
    before != bits[index / 64]
}

fn unite(bits: &mut [u64], others: &[u64]) {
    bits.iter_mut().zip(others).for_each(|(bits, others)| *bits |= others);
}

fn members(bits: &[u64]) -> impl Iterator<Item = usize> + '_ {
    (0..bits.len() * 64).filter(|index| bits[index / 64] >> (index % 64) & 1 == 1)
}

/// What a node may be read as.
#[derive(Debug, Clone, PartialEq)]
struct Ends {
    may_be_empty: bool,
    first: Bits,
    last: Bits,
}

/// The terminals of a grammar, in the order in which its nodes have them.
pub(super) struct Terminals {
    whole: Vec<bool>,
}

impl Terminals {
    pub(super) fn of(grammar: &Grammar) -> Self {
        let mut terminals = Vec::new();
        grammar.rules.iter().for_each(|rule| list(&rule.body, &mut terminals));
        let mut whole = vec![true; terminals.len()];
        let mut work = 0;
        loop {
            let conflicts = Positions::of(&terminals, &whole, work).and_then(|mut positions| {
                let split = positions.conflicts(grammar);
                work = positions.work;
                split
            });
            let Some(split) = conflicts else {
                return Self { whole: vec![false; terminals.len()] };
            };
            if split.is_empty() {
                return Self { whole };
            }
            split.into_iter().for_each(|terminal| whole[terminal] = false);
        }
    }

    /// The terminal is read as one, not character by character.
    pub(super) fn is_whole(&self, terminal: usize) -> bool {
        self.whole[terminal]
    }
}

fn list(node: &Node, terminals: &mut Vec<Node>) {
    match node {
        Node::Class(_) | Node::Run(_) | Node::Text(_) => terminals.push(node.clone()),
        Node::All(inner) | Node::Any(inner) => inner.iter().for_each(|node| list(node, terminals)),
        Node::Repeated(inner, ..) => list(inner, terminals),
        Node::Rule(_) => {}
    }
}

struct Positions {
    reads: Vec<Read>,
    /// By position: its terminal.
    terminals: Vec<usize>,
    /// By terminal: its first position.
    starts: Vec<usize>,
    /// By position: those that may stand behind it.
    next: Vec<Bits>,
    /// Runs behind which the same may stand, but for their own repetition: two of them are not one.
    again: Vec<usize>,
    /// That was done so far.
    work: usize,
}

impl Positions {
    /// `None`: there are too many. `work`: that was done before.
    fn of(nodes: &[Node], whole: &[bool], work: usize) -> Option<Self> {
        let (mut reads, mut terminals, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for (terminal, (node, whole)) in nodes.iter().zip(whole).enumerate() {
            starts.push(reads.len());
            match node {
                Node::Text(text) if *whole && !text.is_empty() => reads.push(Read::Text(text.clone())),
                Node::Text(text) => reads.extend(text.iter().map(|char| Read::Single(vec![(*char, *char)]))),
                Node::Run(class) if *whole => reads.push(Read::Run(class.clone())),
                Node::Run(class) | Node::Class(class) => reads.push(Read::Single(class.clone())),
                _ => unreachable!("terminals alone are listed"),
            }
            terminals.resize(reads.len(), terminal);
            if reads.len() > MOST_POSITIONS {
                return None;
            }
        }
        let next = vec![vec![0; reads.len().div_ceil(64)]; reads.len()];
        Some(Self { reads, terminals, starts, next, again: Vec::new(), work })
    }

    fn none(&mut self) -> Ends {
        self.work += 4 + self.reads.len() / 32;
        let none = vec![0; self.reads.len().div_ceil(64)];
        Ends { may_be_empty: false, first: none.clone(), last: none }
    }

    /// The terminals that must not be whole; `None`: that takes too long to find.
    fn conflicts(&mut self, grammar: &Grammar) -> Option<Vec<usize>> {
        let none = self.none();
        self.work += grammar.rules.len() * (1 + self.reads.len() / 32);
        let mut rules = vec![none; grammar.rules.len()];
        // The last turn changes no rule, and so has seen all that stands behind each position.
        loop {
            let mut terminal = 0;
            let ends: Vec<Ends> =
                grammar.rules.iter().map(|rule| self.ends(&rule.body, &rules, &mut terminal)).collect();
            if ends == rules {
                break;
            }
            if self.work > MOST_WORK {
                return None;
            }
            rules = ends;
        }
        let next: Vec<Vec<usize>> = self.next.iter().map(|next| members(next).collect()).collect();
        let mut together = vec![vec![0; self.reads.len().div_ceil(64)]; self.reads.len()];
        let first: Vec<usize> = members(&rules[grammar.root].first).collect();
        let mut open = Vec::new();
        let mut work = self.work;
        let mut add = |ones: &[usize], others: &[usize], open: &mut Vec<(usize, usize)>| {
            for &one in ones {
                for &other in others {
                    work += 1;
                    if set(&mut together[one], other) {
                        open.push((one, other));
                    }
                }
            }
            work <= MOST_WORK
        };
        let mut split = self.again.clone();
        let mut goes_on = add(&first, &first, &mut open);
        while let (true, Some((one, other))) = (goes_on, open.pop()) {
            let (read, beside) = (&self.reads[one], &self.reads[other]);
            if one == other || read.coincides(beside) {
                goes_on = add(&next[one], &next[other], &mut open);
            } else if read.conflicts(beside) {
                split.extend([one, other].into_iter().filter(|at| !matches!(self.reads[*at], Read::Single(_))));
            }
        }
        self.work = work;
        let mut terminals: Vec<usize> = split.into_iter().map(|at| self.terminals[at]).collect();
        terminals.sort_unstable();
        terminals.dedup();
        goes_on.then_some(terminals)
    }

    /// Notes what stands behind what inside of a node. `terminal`: the number of the next.
    fn ends(&mut self, node: &Node, rules: &[Ends], terminal: &mut usize) -> Ends {
        let mut ends = self.none();
        match node {
            Node::Class(_) | Node::Run(_) | Node::Text(_) => {
                let start = self.starts[*terminal];
                let end = self.starts.get(*terminal + 1).copied().unwrap_or(self.reads.len());
                *terminal += 1;
                ends.may_be_empty = start == end;
                if start < end {
                    set(&mut ends.first, start);
                    set(&mut ends.last, end - 1);
                }
                (start + 1..end).for_each(|at| _ = set(&mut self.next[at - 1], at));
            }
            Node::Rule(rule) => return rules[*rule].clone(),
            Node::All(inner) => {
                ends.may_be_empty = true;
                for node in inner {
                    let behind = self.ends(node, rules, terminal);
                    self.link(&ends.last, &behind.first, None);
                    if ends.may_be_empty {
                        unite(&mut ends.first, &behind.first);
                    }
                    if !behind.may_be_empty {
                        ends.last.fill(0);
                    }
                    unite(&mut ends.last, &behind.last);
                    ends.may_be_empty &= behind.may_be_empty;
                }
            }
            Node::Any(inner) => {
                for node in inner {
                    let one = self.ends(node, rules, terminal);
                    ends.may_be_empty |= one.may_be_empty;
                    unite(&mut ends.first, &one.first);
                    unite(&mut ends.last, &one.last);
                }
            }
            Node::Repeated(inner, least, most) => {
                let begins_with_run = match &**inner {
                    Node::Any(inner) => matches!(inner[0], Node::Run(_)),
                    inner => matches!(inner, Node::Run(_)),
                };
                let own = (begins_with_run && *least <= 1 && most.is_none()).then(|| self.starts[*terminal]);
                ends = self.ends(inner, rules, terminal);
                ends.may_be_empty |= *least == 0;
                if most.is_none_or(|most| most > 1) {
                    self.link(&ends.last, &ends.first, own);
                }
            }
        }
        ends
    }

    /// `own`: the run whose repetition this is.
    fn link(&mut self, last: &[u64], first: &[u64], own: Option<usize>) {
        for at in members(last) {
            self.work += first.len();
            unite(&mut self.next[at], first);
            let is_again = first[at / 64] >> (at % 64) & 1 == 1 && Some(at) != own;
            if is_again && matches!(self.reads[at], Read::Run(_)) {
                self.again.push(at);
            }
        }
    }
}
