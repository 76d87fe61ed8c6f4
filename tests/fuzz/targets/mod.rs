//! The table of targets, and their bodies by where the bytes come from.

mod config;
mod fleet;
mod grammars;
mod model;
mod output;
mod plans;
mod requests;
mod templates;

#[cfg(test)]
pub use output::stops_hold;

/// A place where bytes enter.
pub struct Target {
    /// Also of its directory in the corpus.
    pub name: &'static str,
    /// Panics where these bytes break what the place promises for any.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: &[Target] = &[
    // Clients' requests.
    Target { name: "chat", run: requests::chat },
    Target { name: "completions", run: requests::completions },
    Target { name: "messages", run: requests::messages },
    Target { name: "responses", run: requests::responses },
    Target { name: "tokenize", run: requests::tokenize },
    Target { name: "detokenize", run: requests::detokenize },
    Target { name: "grpc", run: requests::grpc },
    Target { name: "schema", run: grammars::schema },
    Target { name: "regex", run: grammars::regex },
    Target { name: "grammar", run: grammars::grammar },
    // What models write.
    Target { name: "reply", run: output::reply },
    Target { name: "output", run: output::output },
    Target { name: "stops", run: output::stops },
    // Files of models.
    Target { name: "template", run: templates::template },
    Target { name: "tokenizer", run: model::tokenizer },
    Target { name: "text_config", run: model::text_config },
    Target { name: "model_config", run: model::model_config },
    Target { name: "safetensors", run: model::safetensors },
    // Files of operators.
    Target { name: "keys", run: config::keys },
    Target { name: "options", run: config::options },
    // Hosts that join.
    Target { name: "fleet", run: fleet::fleet },
    // The server's plans, in its workers.
    Target { name: "plans", run: plans::plans },
];
