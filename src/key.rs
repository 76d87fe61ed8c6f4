//! `looplane key`: draws an API key, and the line for the file of keys that lets it in.

use std::{
    io::{self, Write},
    num::NonZeroU32,
};

use clap::Args;
use looplane_server::keys::{KeyLimits, new_key};

use crate::output::say;

/// Whose key it is, and what it may use.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// Whose key it is: its name in the log
    id: String,

    /// Requests of the key at one time
    #[arg(long, value_name = "N")]
    concurrent: Option<NonZeroU32>,

    /// Tokens of prompts and answers that the key has a minute
    #[arg(long, value_name = "N")]
    tokens_per_minute: Option<NonZeroU32>,
}

/// Says the line on standard output, to be appended to the file, and the key on standard error: it is kept nowhere.
///
/// # Errors
/// The id cannot stand in the file.
pub fn draw(args: &KeyArgs) -> anyhow::Result<()> {
    let limits = KeyLimits {
        concurrent: args.concurrent.map(NonZeroU32::get),
        tokens_per_minute: args.tokens_per_minute.map(NonZeroU32::get),
    };
    let (key, line) = new_key(&args.id, limits).map_err(anyhow::Error::msg)?;
    let _ = writeln!(io::stderr(), "{key}");
    say(&line);
    Ok(())
}
