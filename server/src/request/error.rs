//! Why a request is not valid.

/// What is wrong with a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldError {
    /// Its type.
    Type,
    /// Its value.
    Value,
    /// It is not there, and must be.
    Missing,
    /// No such field exists.
    Unknown,
    /// The field exists in this API, but this server does not support it (or not this value).
    Unsupported,
    /// A text of a chat holds, or helps to spell, a control token.
    SpecialToken,
}

impl FieldError {
    /// The stable code that clients see.
    pub fn code(self) -> &'static str {
        match self {
            FieldError::Type => "invalid_type",
            FieldError::Value => "invalid_value",
            FieldError::Missing => "missing_required_parameter",
            FieldError::Unknown => "unknown_parameter",
            FieldError::Unsupported => "unsupported_parameter",
            FieldError::SpecialToken => "special_token_in_content",
        }
    }
}

/// Why a request is not valid. All of them are the client's to mend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A field is wrong.
    #[error("{field}: {message}")]
    Field {
        /// Path of the field, such as `messages[2].content`.
        field: String,
        /// In which way.
        kind: FieldError,
        /// What is wrong with it and what it must be.
        message: String,
    },
    /// Prompt and output do not fit the context.
    #[error(
        "{field}: the context has room for {}, but the prompt takes {prompt_tokens} and {asked} more are asked for; \
         shorten the prompt or lower max_tokens",
        tokens(*max_context)
    )]
    ContextLength {
        /// The field of the prompt.
        field: String,
        /// Tokens of the prompt.
        prompt_tokens: u64,
        /// Generated tokens asked for; at least 1.
        asked: u64,
        /// The model's limit on both together.
        max_context: u32,
    },
    /// A prompt so long that its tokens need not be counted.
    #[error(
        "{field}: the context has room for {}, and a text of {prompt_bytes} bytes or more has more; shorten it",
        tokens(*max_context)
    )]
    PromptBytes {
        /// The field of the prompt.
        field: String,
        /// Bytes of the prompt, as far as they were counted.
        prompt_bytes: usize,
        /// The model's limit on prompt and output together.
        max_context: u32,
    },
    /// Another model is asked for than the one that is served.
    #[error("the model {asked:?} does not exist; this server has {served:?}")]
    ModelNotFound {
        /// The name in the request.
        asked: String,
        /// The name that works.
        served: String,
    },
    /// A request is to be ended that is not being served.
    #[error("no request with the id {id:?} is being served: it has ended, or its key is another one")]
    NoSuchRequest {
        /// As the client has it.
        id: String,
    },
}

impl RequestError {
    /// An error of one field.
    pub fn field(field: impl Into<String>, kind: FieldError, message: impl Into<String>) -> Self {
        RequestError::Field { field: field.into(), kind, message: message.into() }
    }

    /// Control tokens around a chat's prompt are asked for.
    pub fn special_of_chat() -> Self {
        let message = "the chat template writes them; leave the field out";
        Self::field("add_special_tokens", FieldError::Unsupported, message)
    }

    /// The stable code that clients see.
    pub fn code(&self) -> &'static str {
        match self {
            RequestError::Field { kind, .. } => kind.code(),
            RequestError::ContextLength { .. } | RequestError::PromptBytes { .. } => "context_length_exceeded",
            RequestError::ModelNotFound { .. } => "model_not_found",
            RequestError::NoSuchRequest { .. } => "request_not_found",
        }
    }

    /// The same of a field that the client knows by another path.
    #[must_use]
    pub fn with_param(mut self, path: impl FnOnce(&str) -> String) -> Self {
        if let RequestError::Field { field, .. }
        | RequestError::ContextLength { field, .. }
        | RequestError::PromptBytes { field, .. } = &mut self
        {
            *field = path(field);
        }
        self
    }

    /// The field to mend.
    pub fn param(&self) -> &str {
        match self {
            RequestError::Field { field, .. }
            | RequestError::ContextLength { field, .. }
            | RequestError::PromptBytes { field, .. } => field,
            RequestError::ModelNotFound { .. } => "model",
            RequestError::NoSuchRequest { .. } => "request_id",
        }
    }
}

/// "1 token", "2 tokens".
fn tokens(count: u32) -> String {
    format!("{count} {}", if count == 1 { "token" } else { "tokens" })
}
