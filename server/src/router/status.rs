//! How all replicas together are: what the front end says of the model.

use std::sync::Arc;

use crate::engine::{EngineState, ModelInfo};

/// The state of all: ready while one is, and given up when all are.
pub(super) fn of_all(states: impl Iterator<Item = EngineState>) -> EngineState {
    let numbered = states.enumerate().map(|(replica, state)| {
        let words = |words: String| format!("replica {replica}: {words}");
        match state {
            EngineState::Loading(phase) => EngineState::Loading(words(phase)),
            EngineState::Recovering(reason) => EngineState::Recovering(words(reason)),
            EngineState::Failed(reason) => EngineState::Failed(words(reason)),
            state => state,
        }
    });
    numbered.min_by_key(precedence).unwrap_or(EngineState::Failed("there is no replica".into()))
}

/// Which state is that of all.
fn precedence(state: &EngineState) -> u32 {
    match state {
        // All are shut down together.
        EngineState::Draining => 0,
        EngineState::Ready => 1,
        EngineState::Recovering(_) => 2,
        EngineState::Loading(_) => 3,
        EngineState::Failed(_) => 4,
    }
}

/// Shows `next`; whether that is news. Shutting down is the last thing that is said.
pub(super) fn show(state: &mut EngineState, next: EngineState) -> bool {
    let show = *state != EngineState::Draining && *state != next;
    if show {
        *state = next;
    }
    show
}

/// The model, of which all replicas have the same bits, with the least context: any of them can take any request.
pub(super) fn model_of_all(models: impl Iterator<Item = Arc<ModelInfo>>) -> Option<Arc<ModelInfo>> {
    models.min_by_key(|model| model.max_context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use EngineState::{Draining, Failed, Loading, Ready, Recovering};

    #[test]
    fn one_that_is_ready_makes_all_ready_and_the_last_that_fails_fails_all() {
        let all = |states: &[EngineState]| of_all(states.iter().cloned());
        let lost = || Recovering("rank 0 died".into());
        assert_eq!(all(&[Loading("reading".into()), Ready]), Ready);
        assert_eq!(all(&[lost(), Ready, Failed("no".into())]), Ready);
        assert_eq!(all(&[Failed("no".into()), lost()]), Recovering("replica 1: rank 0 died".into()));
        assert_eq!(all(&[Failed("no".into()), Failed("neither".into())]), Failed("replica 0: no".into()));
        assert_eq!(all(&[Ready, Draining]), Draining);
        let mut state = Draining;
        assert!(!show(&mut state, Ready) && state == Draining);
    }
}
