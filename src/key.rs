//! `looplane key`: draws an API key, and the line for the file of keys that lets it in.

use std::{
    io::{self, Write},
    num::NonZeroU32,
};

use clap::Args;
use looplane_server::{
    engine::{MAX_WEIGHT, PRIORITIES},
    keys::{KeyLimits, new_key},
};

use crate::output::say;

/// Whose key it is, and what it may use.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// Whose key it is: its name in the log
    id: String,

    /// Requests of the key at one time
    #[arg(long, value_name = "N")]
    concurrent: Option<NonZeroU32>,

    /// Requests that the key has a minute
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<NonZeroU32>,

    /// Tokens of prompts and answers that the key has a minute
    #[arg(long, value_name = "N")]
    tokens_per_minute: Option<NonZeroU32>,

    /// The same a day
    #[arg(long, value_name = "N")]
    tokens_per_day: Option<NonZeroU32>,

    /// The key's share of a server that is full, by those of other keys [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WEIGHT)))]
    weight: Option<u32>,

    /// The first priority that the key's requests may ask for; the lowest is first [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = priority())]
    priority: Option<i32>,

    /// The key may change how the server runs: restart replicas
    #[arg(long)]
    admin: bool,
}

fn priority() -> clap::builder::RangedI64ValueParser<i32> {
    clap::value_parser!(i32).range(i64::from(*PRIORITIES.start())..=i64::from(*PRIORITIES.end()))
}

/// Says the line on standard output, to be appended to the file, and the key on standard error: it is kept nowhere.
///
/// # Errors
/// The id cannot stand in the file.
pub fn draw(args: &KeyArgs) -> anyhow::Result<()> {
    let limits = KeyLimits {
        concurrent: args.concurrent.map(NonZeroU32::get),
        requests_per_minute: args.requests_per_minute.map(NonZeroU32::get),
        tokens_per_minute: args.tokens_per_minute.map(NonZeroU32::get),
        tokens_per_day: args.tokens_per_day.map(NonZeroU32::get),
        weight: args.weight,
        priority: args.priority,
        admin: args.admin,
    };
    let (key, line) = new_key(&args.id, limits).map_err(anyhow::Error::msg)?;
    let _ = writeln!(io::stderr(), "{key}");
    say(&line);
    Ok(())
}
