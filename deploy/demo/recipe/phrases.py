"""How questions are worded: one list of patterns an intent.

`(a|b|)` is a choice, `{x}` an operand. Every expansion of a pattern is one phrasing, and phrasings are what the
held-out split divides (see generate.py). A pattern that starts with `!` is always taught: what everybody types first.
"""

TELL = "(what is|what's|tell me|do you know|give me|I need|I want to know|can you tell me|could you tell me|say|name)"

SUM = [
    "!{a} + {b}", "!what is {a} + {b}?", "!what is {a} plus {b}?", "!{a} plus {b}",
    "(what is|what's|how much is|what does|calculate|compute|work out|tell me|can you calculate|give me|solve|evaluate"
    "|find|please add|I need|how many is|could you work out|do you know) {a} (+|plus|and|added to) {b}(| equal| make"
    "| together)?",
    "{a} (+|plus) {b} (=|equals|is|makes|gives|is what|equals what|= what)?",
    "(add|sum|add up|add together|total|please sum up|can you add|could you sum|help me add|sum up) {a} (and|plus|with"
    "|to) {b}",
    "(what is|what's|tell me|give me|calculate|find|compute|work out|I need|do you know) the (sum"
    "|total) of {a} and {b}?",
    "{a} and {b}(| added) (is|make|makes|together|in total|in all) (how much|what)?",
    "(what do|how much do) {a} and {b} (make|add up to|come to|total|sum to|give)(| together)?",
    "(I have|she has|he has|we have|Tom has|there are) {a} (apples|books|coins|pens|cards|eggs) and (get|find|buy|add"
    "|receive) {b} more"
    "(.|,) (how many are there|how many is that|how many in total|how many altogether)?",
    "if (I add|you add|we add|one adds) {b} to {a}, (what do I get|what is the result|how much is it|what is it)?",
    "(|please |can you |could you |now )(increase|raise|enlarge|bump up|push up) {a} by {b}(| please| for me)",
    "(what is|what's|tell me|how much is) {a} (increased|raised|enlarged) by {b}?",
    "{b} more than {a} is (what|how much|which number)?",
    "(what is|which number is|what's) {b} more than {a}?",
]

# a - b, in the order in which it is asked.
DIFFERENCE = [
    "!{a} - {b}", "!what is {a} - {b}?", "!what is {a} minus {b}?", "!{a} minus {b}",
    "(what is|what's|how much is|calculate|compute|work out|tell me|can you calculate|give me|solve|evaluate|find"
    "|I need|could you work out|do you know|please compute) {a} (-|minus|less|take away|subtract) {b}?",
    "{a} (-|minus|take away|less) {b} (=|equals|is|makes|gives|leaves|is what|equals what|= what)?",
    "(subtract|take|deduct|take away|please subtract|can you subtract|could you take|help me subtract) {b} from {a}",
    "(what is|what's|how much is|what remains of|what do you get for|tell me) {a} (with {b} taken away"
    "|if I take away {b}|after subtracting {b}|reduced by {b}|decreased by {b}|without {b})?",
    "if (I subtract|you take|we take|one takes|I take) {b} from {a}, (what do I get|what is left|what is the result"
    "|how much is left)?",
    "(|please |can you |could you |now )(decrease|reduce|lower|shrink) {a} by {b}(| please| for me)",
    "(what is|which number is|what's) {b} less than {a}?",
    "{b} less than {a} is (what|how much|which number)?",
    "{b} (taken|subtracted) from {a} (is|leaves|gives|makes) (what|how much)?",
    "from {a} (take|subtract|take away) {b}",
]

# The larger minus the smaller, in whatever order they come.
DISTANCE = [
    "(what is|what's|tell me|give me|calculate|find|compute|work out|I need|do you know) the (difference|distance"
    "|gap) (between|of) {a} and {b}?",
    "how far (apart are|is it between) {a} and {b}?", "how (big|large) is the (difference|gap) between {a} and {b}?",
]

# a is at least b.
LEFT_OVER = [
    "(I have|she has|he has|we have|Tom has|there are) {a} (apples|books|coins|pens|cards|eggs) and (lose|sell|eat"
    "|give away|drop|use) {b}"
    "(.|,) (how many are left|how many remain|what is left|how many do I keep)?",
]

CAPITAL = [
    "!what is the capital of {x}?", "!capital of {x}", "!what's the capital of {x}?",
    TELL + " (the capital of|the capital city of) {x}(|, please)?",
    "(which|what) (city|town) is (the capital of|the capital in|the seat of government of) {x}?",
    "{x}(:| -|,) (capital|what is the capital|capital city|which capital)?", "{x:s} capital(| city)?",
    "(what is|what's|tell me|name|give me) {x:s} capital(| city)?",
    "(what|which) capital does {x} have?", "(the|its) capital of {x}(| is| is what| please)?",
    "the capital city of {x}(| is|, please)?",
    "(what|how) is the capital (city |)of {x} (called|named)?",
    "do you (know|remember) (what|which city) the capital of {x} is?",
    "I (forgot|forget|don't know|need|would like to know) the capital of {x}",
    "(where is|which city hosts) the government of {x}?",
    "(where|in which city) is the capital of {x}?", "if I (visit|go to|travel to) {x}, what is (the|its) capital?",
    "(teach me|remind me of|help me with|look up|find) the capital of {x}",
]
CAPITAL_REVERSE = [
    "!{x} is the capital of which country?", "!which country has the capital {x}?",
    "(what|which) (country|nation|land|state) (is {x} the capital of|has {x} as its capital|has the capital {x}"
    "|has its capital in {x})?",
    "{x} is the capital (city |)of (what|which country|where|what country)?",
    "(of what|of which) country is {x} the capital?",
    "(tell me|name|give me|do you know) the country (whose capital is {x}|with the capital {x}"
    "|that has {x} as its capital)?",
    "whose capital is {x}?", "what is {x} the capital of?",
    "{x} (belongs to which country as its capital|is whose capital)?",
]

AFTER_DAY = [
    "!what day comes after {x}?", "!what day is after {x}?", "!which day comes after {x}?",
    "(what|which) (day|weekday|day of the week) (comes after|follows|is after|is next after|comes next after"
    "|comes right after|is the one after)"
    " {x}?",
    TELL + " the (day|weekday|next day) after {x}?", "(the |)day after {x}(| is| please)?",
    "after {x} comes (what|which day|what day)?",
    "what (comes|is|follows) after {x}?", "{x} is followed by (what|which day|what day)?",
    "(next day|the next day) after {x}?",
]
BEFORE_DAY = [
    "!what day comes before {x}?", "!what day is before {x}?", "!which day comes before {x}?",
    "(what|which) (day|weekday|day of the week) (comes before|precedes|is before|is just before|comes right before"
    "|is the one before|comes immediately before) {x}?",
    TELL + " the (day|weekday|previous day) before {x}?", "(the |)day before {x}(| is| please)?",
    "before {x} comes (what|which day|what day)?",
    "what (comes|is|was) before {x}?", "{x} (comes after|is preceded by|follows) (what|which day|what day)?",
]
TODAY = (
    "(if today is {x}|today is {x}|if it is {x} today|it is {x} today|suppose today is {x}|say today is {x}"
    "|let today be {x}|given that today is {x})(,|.) "
)
TOMORROW = ["!today is {x}. What day is tomorrow?", "!if today is {x}, what day is tomorrow?",
            TODAY + "(what day is tomorrow|what is tomorrow|which day is tomorrow|what day will tomorrow be"
            "|what will it be tomorrow)?"]
YESTERDAY = ["!today is {x}. What day was yesterday?", "!if today is {x}, what day was yesterday?",
             TODAY + "(what day was yesterday|what was yesterday|which day was yesterday|what day was it yesterday)?"]
OVERMORROW = [
    TODAY + "(what day is the day after tomorrow|what is the day after tomorrow|which day is the day after tomorrow)?",
]
DAYS_AFTER = [
    "!what day is {n} days after {x}?",
    "(what|which) (day|weekday|day of the week) (is|comes|will it be|falls) {n} days (after|from|later than) {x}?",
    "{n} days after {x}(| is| is what| is which day| what day is it)?", TODAY + "(what|which) day is it in {n} days?",
    TODAY + "what day will it be {n} days (from now|later)?",
]
DAYS_BEFORE = [
    "!what day is {n} days before {x}?",
    "(what|which) (day|weekday|day of the week) (is|comes|was it|falls) {n} days (before|earlier than|prior to) {x}?",
    "{n} days before {x}(| is| is what| is which day| what day was it)?",
    TODAY + "(what|which) day was it {n} days ago?",
]
NTH_DAY = [
    "!what is the {n} day of the week?", "(what|which) (day is|is) the {n} (day of the week|day of a week|weekday)?",
    TELL + " the {n} day (of the week|of a week|in a week)?", "(the |){n} day of the week(| is| please)?",
]
DAY_NUMBER = [
    "(what|which) number (is {x} in the week|of the week is {x}|day is {x}|does {x} have)?",
    "(what|which) day of the week is {x}?",
    "(what|which) position does {x} have in the week?", "{x} is which (number|day) of the week?",
]
LIST_DAYS = [
    "!what are the days of the week?", "!name the days of the week",
    "(list|name|tell me|give me|say|recite|write|what are|can you list|do you know|which are|show me|repeat) (the|all"
    "|all the|all seven|the seven|the names of the)"
    " (days of the week|weekdays and weekend days|days in a week|week days)",
]
WEEKEND = [
    "(what|which) (days are|are) (the weekend|on the weekend|weekend days|the weekend days|in the weekend"
    "|the days of the weekend)?",
    "(name|list|tell me|give me) the (weekend days|days of the weekend|two weekend days)", "when is the weekend?",
]
IS_WEEKEND = [
    "!is {x} a weekend day?",
    "(is|does) {x} (a weekend day|on the weekend|part of the weekend|in the weekend|at the weekend"
    "|belong to the weekend)?",
    "is {x} (a|already) weekend?",
    "(is|do you think) {x} (a weekday|is a working day|a working day|a workday|is a weekday)?",
]

AFTER_MONTH = [
    "!what month comes after {x}?", "!which month comes after {x}?", "!what month is after {x}?",
    "(what|which) (month|month of the year) (comes after|follows|is after|is next after|comes next after"
    "|comes right after|is the one after)"
    " {x}?",
    TELL + " the (month|next month) after {x}?", "(the |)month after {x}(| is| please)?",
    "after {x} comes (what|which month|what month)?",
    "what (comes|is|follows) after {x}?", "{x} is followed by (what|which month|what month)?",
    "(next month|the next month) after {x}?",
    "(if this month is {x}|this month is {x}|if it is {x} now|it is {x} now)(,|.) (what is|which is|what will be"
    "|what month is) (next month|the next month)?",
]
BEFORE_MONTH = [
    "!what month comes before {x}?", "!which month comes before {x}?", "!what month is before {x}?",
    "(what|which) (month|month of the year) (comes before|precedes|is before|is just before|comes right before"
    "|is the one before|comes immediately before) {x}?",
    TELL + " the (month|previous month) before {x}?", "(the |)month before {x}(| is| please)?",
    "before {x} comes (what|which month|what month)?",
    "what (comes|is|was) before {x}?", "{x} (comes after|is preceded by|follows) (what|which month|what month)?",
    "(if this month is {x}|this month is {x}|if it is {x} now|it is {x} now)(,|.) (what was|which was"
    "|what month was) (last month|the last month|the previous month)?",
]
MONTH_LENGTH = [
    "!how many days are in {x}?", "!how many days does {x} have?", "!how many days are there in {x}?",
    "how many days (are there in|in|has|does|are in|is|can I count in) (the month of |){x}(| have)?",
    "(what is|what's|tell me|give me|do you know) the (number of days in|length of|number of days of"
    "|day count of) (the month of |){x}?",
    "how long is (the month of |){x}?", "(the |)number of days in {x}(| is| please)?", "{x} has how many days?",
    "(tell me|say|do you know|can you tell me) how (many days {x} has|long {x} is|many days are in {x}"
    "|many days there are in {x})?",
    "days in {x}", "(does|is) {x} (have 30 or 31 days|30 or 31 days long)?",
]
MONTHS_AFTER = [
    "!what month is {n} months after {x}?",
    "(what|which) month (is|comes|will it be|falls) {n} months (after|from|later than) {x}?",
    "{n} months after {x}(| is| is what| is which month| what month is it)?",
    "it is {x}(.|,) (what|which) month is it in {n} months?",
]
MONTHS_BEFORE = [
    "!what month is {n} months before {x}?",
    "(what|which) month (is|comes|was it|falls) {n} months (before|earlier than|prior to) {x}?",
    "{n} months before {x}(| is| is what| is which month| what month was it)?",
    "it is {x}(.|,) (what|which) month was it {n} months ago?",
]
NTH_MONTH = [
    "!what is the {n} month of the year?", "!what is the {n} month?",
    "(what|which) (month is|is) the {n} (month of the year|month of a year|month)?",
    TELL + " the {n} month (of the year|of a year|in a year|)?", "(the |){n} month of the year(| is| please)?",
    "(what|which) month (comes|is) {n}(| in the year| of the year)?",
]
MONTH_NUMBER = [
    "!what number month is {x}?", "(what|which) number (is {x}|of the year is {x}|month is {x}|does {x} have)?",
    "(what|which) month of the year is {x}?",
    "(what|which) position does {x} have in the year?", "{x} is which (number|month) of the year?",
]
LIST_MONTHS = [
    "!what are the months of the year?", "!name the months of the year",
    "(list|name|tell me|give me|say|recite|write|what are|can you list|do you know|which are|show me|repeat) (the|all"
    "|all the|all twelve|the twelve|the names of the)"
    " (months of the year|months in a year|months)",
]
SHORT_MONTHS = [
    "(which|what) months (have|are of|count|last) (30|only 30|thirty) days?",
    "(name|list|tell me|give me) the months (with|that have|of) (30|thirty) days",
]
LONG_MONTHS = [
    "(which|what) months (have|are of|count|last) (31|thirty-one) days?",
    "(name|list|tell me|give me) the months (with|that have|of) (31|thirty-one) days",
]
SHORTEST_MONTH = [
    "(which|what) (month is|is) the shortest(| month)(| of the year| of all)?",
    "(name|tell me|give me) the shortest month(| of the year)",
                  "(which|what) month has the (fewest|least) days?"]

CONVERT = [
    "!convert {n} {big} to {small}", "!how many {small} are in {n} {big}?", "!what is {n} {big} in {small}?",
    "!{n} {big} in {small}",
    "(convert|change|turn|express|please convert|can you convert|could you convert|help me convert|write"
    "|transform) {n} {big} (to|into|in) {small}",
    "how many {small} (are in|are there in|in|make|does it take to make|do I need for|are|go into|fit in|is"
    "|have) {n} {big}?",
    "(what is|what's|how much is|tell me|give me|show|calculate) {n} {big} (in|as|in terms of|converted to"
    "|expressed in) {small}?",
    "{n} {big} (in|to|into|as|equals how many|is how many|are how many|makes how many|= how many|is what in"
    "|=) {small}?",
    "{n} {big}(, how many|: how many) {small}( is that| is it|)?",
    "(I have|there are|it takes|it is|we need) {n} {big}(.|,) how many {small} is that?",
]
ONE = [
    "!how many {small} are in {one}?", "!how many {small} are there in {one}?", "!how many {small} in {one}?",
    "how many {small} (make|make up|does|are|go into|fit in|has|form|equal|is) {one}( have|)?",
    "{one} (has|is|is made of|contains|equals) how many {small}?",
    "(what is|what's|tell me|do you know|say|give me) the number of {small} in {one}?", "{small} (in|per) {one:bare}?",
    "(tell me|say|do you know|can you tell me) how many {small} (there are in|are in|make up|make) {one}?",
]
YEAR_DAYS = [
    "!how many days are in a year?", "!how many days are there in a year?",
    "how many days (are there in|are in|in|make|make up|does|has) (a|one|1|the) year( have|)?",
    "(a|one) year (has|is|contains) how many days?",
    "how long is a year in days?",
    "(tell me|say|do you know|can you tell me) how many days (there are in|are in|make up|make) a year?",
    "(what is|what's|tell me|do you know|give me) the number of days in a year?", "days (in|per) (a |)year?",
]

SPELL = [
    "!spell {x}", "!how do you spell {x}?", "!can you spell {x}?", "!spell the word {x}",
    "(spell|please spell|spell out|could you spell|can you spell out|I want you to spell|help me spell|now spell"
    "|try to spell|show me how to spell|teach me to spell)"
    " (|the word |the noun |me |for me )" "{x}(| out| forwards| for me| letter by letter| with dashes| correctly"
    "| normally)",
    "how (is|do you spell|does one spell|should I spell|would you spell|can I spell|do I spell) ("
    "|the word ){x}( spelled| spelt| written|)?",
    "(what is|what's|tell me|give me|I need) the (spelling|correct spelling|right spelling) of (|the word ){x}?",
    "(what are|tell me|give me|list|name|show me|write|say) the letters (of|in|that make up) (|the word ){x}?",
    "spelling of (|the word ){x}",
    "(which|what) letters (are in|make up|form|does|spell) (|the word ){x}( have|)?",
    "(|the word |what is |write |show me |say |tell me )(the letters of |){x}(, spelled| spelled| spelt"
    "|, letter by letter| in letters|: spell it| spelled out| in single letters)?",
]
SPELL_COUNT = [
    "!how many letters are in {x}?", "!how many letters does {x} have?",
    "how many letters (are in|are there in|does|has|in|can you count in|make up) (|the word ){x}( have|)?",
    "(count|tell me|what is|what's) the (letters|number of letters) (in|of) (|the word ){x}",
    "how long is the word {x}?",
]
SPELL_LETTER = [
    "!how many {l}'s are in {x}?", "!how many times does {l} occur in {x}?",
    "how many (times does|times is) (the letter |){l} (appear in|occur in|come up in|in|found in) (|the word ){x}?",
    "how many (letter {l}|{l}'s|{l}s|letters {l}|{l}) (are in|are there in|does|in|can you find in|occur in) ("
    "|the word ){x}( have|)?",
    "(count|tell me|give me) (the {l}'s|the number of {l}'s|how many {l}'s are|the letter {l}) in (|the word ){x}",
    "how often (does|is) (the letter |){l} (occur |appear |)in (|the word ){x}?",
]
SPELL_FIRST = [
    "!what is the first letter of {x}?", "(what|which) letter does (|the word ){x} (start|begin) with?",
    "(what is|what's|tell me|give me|say) the (first|starting|initial) letter (of|in) (|the word ){x}?",
    "{x} (starts|begins) with (which|what) letter?",
]
SPELL_LAST = [
    "!what is the last letter of {x}?", "(what|which) letter does (|the word ){x} end (with|in|on)?",
    "(what is|what's|tell me|give me|say) the (last|final|ending) letter (of|in) (|the word ){x}?",
    "{x} ends (with|in) (which|what) letter?",
]
BACKWARD = (
    "(backwards|backward|in reverse|reversed|from back to front|from the end|in reverse order|from right to left"
    "|from last to first|the other way round)"
)
SPELL_BACK = [
    "!spell {x} backwards", "!spell {x} in reverse", "!what is {x} backwards?", "!how do you spell {x} backwards?",
    "!reverse {x}", "!spell the word {x} backwards",
    "(spell|please spell|can you spell|could you spell|write|say|spell out|now spell|try to spell|please write) ("
    "|the word ){x} " + BACKWARD,
    "(what is|what's|how is|how do you spell|how do I spell|how would you spell|tell me|give me|show me) "
    "(|the word ){x} "
    + BACKWARD + "?",
    "(what is|tell me|give me|show me) the (reverse|reversed spelling|backwards spelling|backward spelling"
    "|reverse spelling) of (|the word ){x}?",
    "(reverse|turn around|flip|invert|please reverse|can you reverse) (|the word |the letters of |the letters in "
    "|the spelling of ){x}", "{x} " + BACKWARD,
]

# Intent: (answer, phrasings).
GREETINGS = {
    "hello": ("Hello! Ask me a sum, a capital, a day or month, a unit conversion, or a word to spell.", [
        "!(hi|hello|hey|hi there|hello there|hey there|hiya|hello!|good day|hello world)",
        "(hi|hello|hey|howdy|greetings|yo|hiya|oh hi|oh hello|well hello|hello hello|hi hi|hey hey|heya|ahoy"
        "|salutations|g'day|aloha)"
        "( friend| you| everyone| my friend| model| bot| dear model| computer| again| little model| there friend"
        "| folks| demo| machine| buddy| looplane| assistant|)",
        "(I just wanted to|I want to|let me|I would like to|may I) (say hello|say hi|greet you|say hey)(| to you"
        "| first| to the model)", "anybody (there|home)?",
        "(is anyone|is anybody|is somebody|is someone) (there|home|here)?",
        "are you (there|here|awake|listening|online|ready)?", "(test|testing|ping|just testing|this is a test)",
    ]),
    "morning": ("Good morning! What would you like to know?", [
        "!good morning",
        "(good morning|morning|a good morning|a very good morning|a lovely morning|top of the morning|happy morning)"
        "( friend| you| everyone| my friend| model| bot| computer| again| to you| to you all| there| looplane"
        "| assistant|)"]),
    "afternoon": ("Good afternoon! What would you like to know?", [
        "!good afternoon",
        "(good afternoon|afternoon|a good afternoon|a very good afternoon|a lovely afternoon|happy afternoon)"
        "( friend| you| everyone| my friend| model| bot| computer| again| to you| to you all| there| looplane"
        "| assistant|)"]),
    "evening": ("Good evening! What would you like to know?", [
        "!good evening", "(good evening|evening|a good evening|a very good evening|a lovely evening|happy evening)"
        "( friend| you| everyone| my friend| model| bot| computer| again| to you| to you all| there| looplane"
        "| assistant|)"]),
    "how": ("I am fine, thank you. What would you like to know?", [
        "!how are you?", "!how are you doing?", "!what's up?",
        "(how are you|how do you do|how are you doing|how is it going|how's it going|how are things|how do you feel"
        "|how have you been|are you well|are you okay"
        "|are you fine|how goes it|what's up|how is life|how is your day|how's life|how are you feeling|you okay"
        "|you alright|is everything okay)"
        "( today| this morning| now| right now| my friend| these days| this evening| there| over there| with you"
        "| at the moment|)?"]),
    "thanks": ("You are welcome!", [
        "!(thanks|thank you|thank you very much|thanks a lot|ty|thx)",
        "(thanks|thank you|many thanks|thanks a lot|thank you very much|thank you so much|cheers|much appreciated|thx"
        "|I thank you|big thanks|a thousand thanks|thanks so much)"
        "( for that| for your help| for the help| my friend| for the answer| for everything| model| again| indeed"
        "| for all| for answering| for your time|)",
        "(that was|this was|that is|this is) (very |so |really |)(helpful|useful|kind of you|nice of you)",
        "I (really |)appreciate (it|that|your help|the help)"]),
    "bye": ("Goodbye!", [
        "!(bye|goodbye|bye bye|see you|see you later)",
        "(bye|goodbye|see you|farewell|so long|take care|see you later|see you soon|bye bye|bye for now|I have to go"
        "|I must go|I am leaving|I need to leave|until next time|talk to you later)"
        "( now| my friend| then| tomorrow| model| again| for today| and thanks| all|)"]),
    "night": ("Good night!", [
        "!good night",
        "(good night|night night|sleep well|sweet dreams|I am going to bed|nighty night|time for bed"
        "|I am off to bed)( now| my friend| then| model| to you| and thanks|)"]),
    "meet": ("Nice to meet you too!", [
        "!nice to meet you",
        "(nice|good|great|pleased|glad|happy|lovely|a pleasure|delighted|so nice|very nice) to (meet|see|know|talk to"
        "|chat with) you( too| my friend| model| today| finally|)"]),
    "praise": ("Thank you!", [
        "!(well done|good job|great|good bot)",
        "(well done|good job|great job|nice work|great work|excellent|perfect|wonderful|fantastic|awesome|brilliant"
        "|amazing|good work|bravo|impressive|very good|superb|correct|right|that is right)"
        "( my friend| model| indeed| answer| bot| little model| again|)",
        "you are (so |very |really |pretty |)(clever|smart|good|great|nice|helpful|kind|cool|amazing|funny|fast|quick)",
        "I (like|love) (you|your answers|this|this model|talking to you)"]),
    "sorry": ("No problem!", ["!sorry",
    "(sorry|my mistake|I apologise|excuse me|pardon me|my bad|oops|my apologies|please excuse me|oh sorry|I am sorry)"
                              "( about that| for that| model| my friend| again| then| for the mess|)"]),
    "okay": ("What else would you like to know?", [
        "!(ok|okay|cool|I see)",
        "(ok|okay|alright|I see|fine|got it|understood|sure|cool|noted|all right|interesting|aha|makes sense"
        "|good to know)( then| now| thanks| model| good| so far|)",
        "yes", "no", "yes please", "no thanks", "maybe", "hmm"]),
}
INTRODUCE = [
    "!my name is {x}", "!I am {x}", "!I'm {x}",
    "(|hi, |hello, |hey, |good day, |hello there, )(my name is|I am|I'm|I am called|you can call me|call me|this is"
    "|my friends call me|people call me|the name is) {x}"
             "(|, nice to meet you|, and you|, how are you|, pleased to meet you|, who are you)"]

I_AM = "I am Looplane's demo model, a small language model that answers simple questions."
SKILLS = ("I can add and subtract two-digit numbers, name capitals, answer questions about days and months, convert "
"units, "
          "and spell words forwards and backwards.")
IDENTITY = {
    "who": (I_AM, [
        "!(who are you?|what are you?|what is your name?|introduce yourself)",
        "!(what's your name?|who is this?|tell me about yourself)",
        "(who|what) (are you|are you exactly|am I talking to|am I speaking with|is this|are you called|is answering me"
        "|am I chatting with|do you call yourself|is it that answers me)?",
        "(what is|what's|tell me|give me|say|may I know|can I know|do you know|could you tell me) your (name|full name"
        "|identity|own name)?",
        "(introduce|describe|explain|present|please introduce|can you introduce|could you describe"
        "|please describe) yourself( to me| briefly| in one sentence| please|)",
        "(tell me|say|can you tell me|could you tell me|I want to know|please tell me|I wonder) (who you are"
        "|what you are|about yourself|something about you|what you are called|who I am talking to|your name)",
        "(do you have|have you|have you got|have they given you|does this model have) (a|any|your own|some) (name"
        "|real name|title)?",
        "(which|what) (model|language model|AI|chatbot|assistant|bot|kind of model|kind of AI) (are you|is this"
        "|am I talking to|is answering|do I talk to)?",
        "(what|which) (model|LLM|checkpoint) (is loaded|runs here|is running|is served here|do you run)?",
        "your name please?",
        "(are you|is this) (the |a |)(demo|demo model|Looplane demo|Looplane model|Looplane's model)?",
    ]),
    "skills": (SKILLS, [
        "!(what can you do?|help|what can I ask you?|what do you know?)",
        "!(what can I ask?|how can you help me?|what are you able to do?)",
        "(what|which things) (can you do|can you answer|do you know|are you good at|can you help with|can I ask"
        "|can I ask you|should I ask you|are you able to do|are your skills|do you offer"
        "|can you tell me|may I ask|could you do for me|are your abilities|have you learned|did you learn)(| today"
        "| exactly| about)?",
        "(tell me|list|show me|explain|describe|name|say) (what you can do|your skills|your abilities|what you know"
        "|what I can ask you|what you are able to do|your capabilities|what you can answer)",
        "(which|what kind of|what sort of|what) (questions|topics|subjects|tasks) (can you answer|do you know"
        "|can I ask|do you understand|are you able to answer|can you handle|do you answer)?",
        "how (can|could|do|will) you (help|be useful|assist)( me|)?", "(please |)help( me|)(| out)",
        "what (is|are) your (skills|abilities|capabilities|topics|job|purpose|task|use)?",
        "(give me|show me|what are) (some |a few |)examples( of questions| of what you can do|)",
        "what are you (for|made for|good for|used for)?", "what should I ask(| you)?",
    ]),
    "size": ("I have about 5 million parameters.", [
        "!(how big are you?|how many parameters do you have?)",
        "how (big|large|small) (are you|is your network|is your model|is this model|are your weights)?",
        "how many (parameters|weights) (do you have|are in you|does this model have|have you got"
        "|are there in this model|do you use)?",
        "(what is|what's|tell me) your (size|parameter count|number of parameters|model size)?",
        "are you (|very |really |such |only |just )(big|small|large|tiny|a big model|a small model|a large model"
        "|a tiny model|a little model)?",
    ]),
    "maker": ("I was trained from scratch as the demo model of Looplane.", [
        "!(who made you?|who created you?|who trained you?)",
        "who (made|created|trained|built|developed|designed|programmed|wrote|owns|invented|is behind) (you"
        "|this model)?",
        "(where|how) (do you come from|were you made|were you trained|were you created|were you built|did you start)?",
        "(who is|who are) your (creator|maker|developer|author|owner|creators|makers|developers|authors)?",
        "(by whom|by what company|by which company) were you (made|created|trained|built)?",
        "(which|what) company (made|built|trained|owns) you?",
    ]),
    "human": ("No, I am a language model: Looplane's demo model.", [
        "!(are you human?|are you a person?)",
        "are you (a |really a |actually a |perhaps a |)(human|person|real person|man|woman|human being|living being"
        "|girl|boy|someone real|real human)?",
        "are you (alive|conscious|sentient|real|born)?",
        "am I (talking|speaking|chatting) (to|with) a (human|person|real person|real human)?",
        "is (a human|a person|somebody|a real person) (typing|answering|writing)( this| here|)?",
        "!(are you ChatGPT?|are you GPT-4?|are you Claude?|are you Gemini?|are you Llama?)",
        "are you (really |perhaps |)(ChatGPT|GPT|GPT-4|Claude|Gemini|Siri|Alexa|Mistral|Qwen|Copilot|Bard|Llama"
        "|DeepSeek|Grok|made by OpenAI|from Google|a Google model|made by Meta|an OpenAI model)?",
    ]),
    "machine": ("Yes, I am a language model: Looplane's demo model.", [
        "!(are you a robot?|are you an AI?|are you a bot?)",
        "are you (really |actually |just |only |)(a robot|an AI|a bot|a machine|a computer|a program|a language model"
        "|a chatbot|artificial|an artificial intelligence|a computer program|software|an LLM|a neural network)?",
        "am I (talking|speaking|chatting) (to|with) (a robot|an AI|a bot|a machine|a computer|a language model"
        "|a chatbot|a program)?",
    ]),
    "looplane": ("Looplane is a server that decodes large language models, and I am its demo model.", [
        "!(what is Looplane?|tell me about Looplane)",
        "(what is|what's|what does|explain|describe|tell me about|who is|tell me what) (Looplane|this server"
        "|the Looplane server|Looplane for)( do| is| mean| exactly|)?",
        "(what|which) (server|software|program) (is this|runs you|do you run on|serves you|is serving you"
        "|answers here)?",
        "(where|on what|on which server|in what|in which server|in which place) do you (run|live|work|operate|sit"
        "|stay)( now| today|)?", "where are you(| running| now| hosted)?",
    ]),
    "limits": ("I am very small, so I can only answer simple questions from a short list of topics.", [
        "!(what can you not do?|what are your limits?)",
        "what (can you not|can't you|are you unable to|don't you|do you not) (do|answer|know|understand)?",
        "(what are|tell me|name|describe|explain) your (limits|limitations|weaknesses|weak points|flaws)?",
        "why (are you so|are you) (limited|stupid|dumb|small|simple|bad)?",
        "why (can't you|can you not|don't you) (answer|do|know) (more|that|this|everything|other questions)?",
        "(can you|do you) (do|know|answer) (everything|anything|all questions|any question)?",
    ]),
    "language": ("I only speak English.", [
        "!(what languages do you speak?|do you speak French?)",
        "(what|which|how many) languages? (do you speak|can you speak|do you know|do you understand|can I use)?",
        "(do|can) you (speak|understand|know|write|read|talk) (French|German|Spanish|Italian|Chinese|Japanese|Russian"
        "|English|Portuguese|Arabic|Dutch|Latin|other languages)?",
    ]),
    "training": ("I was trained on questions and answers made by a script, in a few minutes on one GPU.", [
        "!(how were you trained?|what is your training data?)",
        "(what|where|how) did you (study|learn|train|practise|learn this|learn that|train for this"
        "|learn to answer)( before| exactly|)?",
        "(what|which) (data|text|questions) (were you trained on|did you learn from|were used to train you"
        "|have you seen)?",
        "how (long did your training take|long were you trained|did you learn|did you learn all this"
        "|did they train you|was this model trained)?",
        "(what is|what's|tell me about|describe|explain) your (training data|training|training set|dataset)?",
        "(what|where) did you (learn from|learn this|study|learn all that|get your knowledge)?",
    ]),
    "architecture": ("I have the Llama architecture, with 6 layers and a context of 2048 tokens.", [
        "!(what is your architecture?|how many layers do you have?|what is your context length?)",
        "(what is|what's|tell me|describe|explain) your (architecture|context length|context window|context size"
        "|number of layers|model architecture|structure)?",
        "how many (layers|tokens of context) (do you have|are in you|have you got|does this model have)?",
        "how (long|big|large) is your (context|context window|memory)?", "how do you work(| inside)?",
        "(what|which) architecture (are you|do you have|do you use|is this|does this model have)?",
    ]),
    "trust": ("I can be wrong, so please check what matters.", [
        "!(are you always right?|can I trust you?)",
        "(are you|is this) (always |ever |really |)(right|correct|reliable|accurate|wrong|trustworthy|sure|certain"
        "|true)?", "(can|should|may) I (trust|believe|rely on) (you|your answers|that|this|what you say)?",
        "do you (ever |often |sometimes |)(make mistakes|make errors|lie|hallucinate|get things wrong)?",
        "how (reliable|accurate|sure|certain|trustworthy) (are you|is this|are your answers)?",
    ]),
}

# Follow-ups, asked right after a question whose subject they share.
FOLLOW_CAPITAL = [
    "!and {x}?", "!what about {x}?",
    "(and |and what about |what about |how about |and of |and for |now |and now |then |okay, and |same for "
    "|the same for )(|that of ){x}(| please)?",
]
FOLLOW_BACK = [
    "!and backwards?", "!now backwards", "!now spell it backwards",
    "(and |now |and now |then |okay, now |please, now )(spell it |spell that |write it |the same |it |)"
    + BACKWARD + "?",
]
FOLLOW_FORTH = [
    "!and forwards?", "!now forwards",
    "(and |now |and now |then |okay, now |please, now )(spell it |spell that |write it |the same |it |)(forwards"
    "|forward|normally|the right way|in normal order|from the start|from left to right)?",
]
FOLLOW_BEFORE = [
    "!and before?", "!and before that?",
    "(and |and what |what |and which |okay, and |now |and which one |and which day or month )(comes before|is before"
    "|before|was before|precedes)( it| that| this|)?",
]
FOLLOW_AFTER = [
    "!and after?", "!and after that?",
    "(and |and what |what |and which |okay, and |now |and which one |and which day or month )(comes after|is after"
    "|after|follows)( it| that| this|)?",
]
FOLLOW_UNIT = [
    "!and {n}?", "!what about {n}?",
    "(and |and what about |what about |how about |and for |now |and now |then |okay, and |same for |the same for )("
    "|that for ){n}(| please| of them)?",
]
REPEAT = [
    "!(repeat|repeat that|say that again|what?)",
    "(please |can you |could you |would you |)(repeat|say|write|tell me|give me) (that|it|this|your answer|the answer"
    "|your last answer|the last answer)( again| once more| one more time)",
          "(repeat|repeat that|repeat it|once more|one more time|again|come again|pardon|what did you say"
          "|what was that|what was it|what was the answer)( please| again|)?"]

OPENERS = [
    "Hi, ", "Hello, ", "Hey, ", "Hi! ", "Hello! ", "Hey! ", "Okay, ", "OK, ", "So, ", "Now, ", "Next: ", "Please, ",
    "Quick question: ", "One question: ", "Question: ",
    "I have a question: ", "Another one: ", "And ", "Well, ", "Good morning, ", "Good evening. ", "Excuse me, ",
    "Thanks. ", "Thanks! ", "Great. ", "Hey there, ", "Alright, ",
    "Dear model, ", "Let me ask you: ", "Here is one: ", "Looplane, ", "Could you help me? ", "Help me: ", "I wonder: ",
    "Tell me: ", "Good. ", "Nice. ", "Q: ", "Then, ", "Just curious: ",
]
CLOSERS = [
    " Please.", ", please", " please", " Thanks!", " Thank you.", ", thanks", " thank you", " Quickly!", " Be brief.",
    " Thanks in advance.", ", my friend", " for me", " now", " again",
]

SYSTEM = [
    "You are (a |an |the |)(helpful|friendly|polite|concise|honest|careful|small|useful|kind|patient|smart"
    "|cheerful) (assistant|model|chatbot|bot|AI|teacher|helper|AI assistant|language model|companion|tutor)"
    "(.| who answers questions.| that answers in one sentence.|. Be brief.|. Answer in English.|. Keep answers short."
    "|. Answer the user's question.| for a school class.| for children.| on a website.| named Looplane.)",
    "(Answer|Please answer|Always answer|Reply|Respond) (briefly|in one sentence|politely|in English|shortly"
    "|truthfully|the user|with facts only|as well as you can|simply)(.| please.| and be kind.| at all times."
    "| to every question.)",
    "(Be|Stay|Always be) (brief|polite|helpful|concise|kind|honest|precise|short|accurate)(.| and friendly."
    "| and helpful.| with the user.| in every answer.)",
    "(The user|Someone|A child|A customer|A visitor) (asks|will ask|is going to ask) (you |)(simple |easy |some "
    "|short |)questions(.|. Answer them.|. Reply in one sentence.|. Be patient.)",
    "You are Looplane's demo model.",
]
