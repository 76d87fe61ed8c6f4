//! The product as processes: the binary that users run, with real workers, asked as clients ask it. `plans` and
//! `schemas` start none: they join two crates that do not know each other.

#[path = "../../loadtest/tests/pages/browser.rs"]
mod browser;
mod common;
#[path = "../../server/tests/common/scrape.rs"]
mod scrape;

/// What is killed, restarted, joined or sent at once.
mod faults {
    mod join;
    mod process;
    pub mod replicas;
    mod restart;
    mod storm;
}
/// What measures a server that runs.
mod figures {
    mod loadtest;
    mod sweep;
}
/// How it is started, watched, secured and described.
mod operation {
    mod deploy;
    mod docs;
    mod keys;
    mod metrics;
    mod notify;
    mod prometheus;
    mod refusals;
    mod start;
    mod tls;
}
/// What a browser shows.
mod pages {
    mod chat_page;
    mod machine_page;
}
/// What clients ask and are answered.
mod protocol {
    mod api;
    mod clients;
    mod demo;
    mod dialects;
    mod golden;
    mod schemas;
    mod structured;
}
/// Answers that are equal to the byte.
mod same_bits {
    mod bits;
    mod plans;
    mod prefix_cache;
}
